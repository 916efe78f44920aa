"""`baton doctor`: checks what Baton needs on this machine, and the cluster if one runs, and says how to mend it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console

from baton.config import Config
from baton.errors import BatonError, NoWorker, StoreUnavailable
from deploy.client import Client
from deploy.models import CATALOGUE, cache_dir
from deploy.processes import why_taken
from deploy.redis import EmbeddedRedis
from kvstore.index import Connection

State = Literal["ok", "warn", "fail"]
MIN_MEMORY_GIB = 4.0
MIN_DISK_GIB = 3.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `mend` says what to do; empty when all is well."""

    name: str
    state: State
    found: str
    mend: str = ""


def diagnose(config: Config, address: str) -> list[Check]:
    """Every check, in order. None of them changes anything or takes more than a few seconds."""
    checks: list[Check] = []
    running = _cluster(address)
    for inspect in (_python, _packages, _torch, _gloo, _redis, lambda: _model(config), _memory, lambda: _disk(config)):
        checks += _guarded(inspect)
    if not running:
        if url := config.index.redis_url:
            checks += _guarded(lambda: _eviction(url))
        checks += _guarded(lambda: _ports(config))
        checks.append(Check("cluster", "ok", f"none runs at {address}", ""))
    return checks + running


def show(checks: list[Check], console: Console) -> None:
    marks = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]FAIL[/red]"}
    for check in checks:
        console.print(f"{marks[check.state]} {check.name}: {check.found}", highlight=False, soft_wrap=True)
        if check.mend:
            console.print(f"     -> {check.mend}", highlight=False, soft_wrap=True)


def _guarded(inspect: Callable[[], Iterator[Check]]) -> list[Check]:
    try:
        return list(inspect())
    except (BatonError, ImportError, OSError, RuntimeError) as error:
        name = getattr(inspect, "__name__", "check").strip("_")
        return [Check(name, "fail", f"{type(error).__name__}: {error}", "run `make install` again")]


def _python() -> Iterator[Check]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    good = sys.version_info >= (3, 11)
    yield Check("python", "ok" if good else "fail", version, "" if good else "install Python 3.11 or newer")


def _packages() -> Iterator[Check]:
    """Installed versions against the pins of the distribution itself."""
    wrong = []
    for requirement in importlib.metadata.requires("baton-serving") or ():
        spec, _, marker = requirement.partition(";")
        name, _, wanted = spec.strip().partition("==")
        if "extra == 'dev'" in marker.replace('"', "'"):
            continue
        try:
            found = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found != wanted:
            wrong.append(f"{name} {found} (needs {wanted})")
    if wrong:
        yield Check("packages", "fail", ", ".join(wrong), "run `make install`, or pip install -e '.[worker,local]'")
    else:
        yield Check("packages", "ok", "all at their pinned versions")


def _torch() -> Iterator[Check]:
    import torch

    device = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "CPU only"
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("torch", "ok", f"{torch.__version__}, {device}, {cpus} CPUs")


def _gloo() -> Iterator[Check]:
    import torch.distributed as dist

    good = dist.is_available() and dist.is_gloo_available()
    yield Check("gloo", "ok" if good else "fail", "available" if good else "missing from this build of torch",
                "" if good else "install the torch build that the Makefile installs")  # fmt: skip


def _redis() -> Iterator[Check]:
    with EmbeddedRedis() as redis:
        yield Check("embedded redis", "ok", f"starts and answers ({redis.url})")


def _eviction(url: str) -> Iterator[Check]:
    """Under any policy but noeviction, Redis drops leases and owners when memory is short, and tells nobody."""
    try:
        policy = asyncio.run(_maxmemory_policy(url))
    except StoreUnavailable as error:
        yield Check("redis eviction", "warn", f"cannot look: {error}", "start Redis, or look from where it answers")
        return
    good = policy == "noeviction"
    yield Check("redis eviction", "ok" if good else "fail", f"maxmemory-policy is {policy}",
                "" if good else "CONFIG SET maxmemory-policy noeviction: evicted keys make the index lie")  # fmt: skip


async def _maxmemory_policy(url: str) -> str:
    connection = Connection(url)
    try:
        return str((await connection.call("INFO", "memory"))["maxmemory_policy"])  # CONFIG GET is often forbidden
    finally:
        await connection.close()


def _model(config: Config) -> Iterator[Check]:
    name = config.model.id
    if name in CATALOGUE:
        folders = sorted((cache_dir(config.cluster) / "models").glob(f"{name}-*/model.safetensors"))
        if folders:
            yield Check("model", "ok", f"{name}, converted in {folders[-1].parent}")
        else:
            yield Check("model", "warn", f"{name} is not converted yet", "`baton up` downloads and converts it (90 MB)")
    elif Path(name).is_dir():
        good = (Path(name) / "config.json").is_file() and (Path(name) / "tokenizer.json").is_file()
        yield Check("model", "ok" if good else "fail", name,
                    "" if good else "the folder needs config.json, tokenizer.json and *.safetensors")  # fmt: skip
    else:
        yield Check("model", "ok", f"{name} comes from the Hugging Face hub")


def _memory() -> Iterator[Check]:
    free = psutil.virtual_memory().available / 2**30
    good = free >= MIN_MEMORY_GIB
    yield Check("memory", "ok" if good else "warn", f"{free:.1f} GiB available",
                "" if good else "lower engine.kv_cache_gib (BATON_ENGINE_KV_CACHE_GIB) or the pool sizes")  # fmt: skip


def _disk(config: Config) -> Iterator[Check]:
    folder = cache_dir(config.cluster)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    good = free >= MIN_DISK_GIB
    yield Check("disk", "ok" if good else "warn", f"{free:.1f} GiB free for {folder}",
                "" if good else "free some, or set BATON_CACHE to a folder with room")  # fmt: skip


def _ports(config: Config) -> Iterator[Check]:
    cluster = config.cluster
    for name, port in (("BATON_GRPC_PORT", cluster.grpc_port), ("BATON_HTTP_PORT", cluster.http_port)):
        if reason := why_taken(cluster.host, port):
            yield Check(f"port {port}", "fail", reason, f"stop what uses it, or set {name} to another port")
        else:
            yield Check(f"port {port}", "ok", "free")


def _cluster(address: str) -> list[Check]:
    """The running cluster's own report; empty when none runs."""
    client = Client(address)
    try:
        status = client.status()
    except NoWorker:
        return []
    except BatonError as error:
        return [Check("cluster", "fail", str(error), "is this the gRPC port of a Baton router?")]
    finally:
        client.close()
    checks = [Check("router", "ok", f"answers at {address}")]
    redis = status["redis"]
    checks.append(Check("redis", "ok" if redis["ok"] else "warn", redis["address"],
                        "" if redis["ok"] else "the router serves from memory; start Redis again"))  # fmt: skip
    if redis["ok"]:
        checks += _guarded(lambda: _eviction(redis["address"]))
    for name, pool in status["pools"].items():
        good = pool["ready"] >= pool["desired"]
        checks.append(Check(f"pool {name}", "ok" if good else "warn", f"{pool['ready']} of {pool['desired']} ready",
                            "" if good else "see the log of `baton up` for workers that do not start"))  # fmt: skip
    for worker in status["workers"]:
        good = worker["self_check"] == "ok"
        checks.append(Check(f"worker {worker['id']}", "ok" if good else "fail", worker["self_check"],
                            "" if good else "a leak: please report it with the worker's log"))  # fmt: skip
    return checks
