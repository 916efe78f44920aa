"""Checks of what a build of torch or a machine may lack: gloo (between ranks), NCCL, RDMA."""

from __future__ import annotations

import re
import resource
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.cluster import Role
from baton.config import Config
from deploy.doctor.checks import Check, judged, names

CAP_IPC_LOCK = 14
"""The capability's number in linux/capability.h."""
LOCKED_BYTES = 2**30
"""Memory that a worker's transports may pin."""


def checks(config: Config, environ: Mapping[str, str]) -> Iterator[Check]:
    """Check what carries data between workers and ranks and may be missing: gloo, NCCL, RDMA.

    Shared memory and TCP need nothing.
    """
    import torch
    import torch.distributed as dist

    may_use_nccl = torch.cuda.is_available() and "nccl" in config.transfer.transports
    if any(config.engine_of(pool).tensor_parallel > 1 for pool in Role):
        is_there = dist.is_available() and dist.is_gloo_available()
        yield judged(
            "gloo",
            is_there,
            "available" if is_there else "missing from this build of torch",
            "install the torch build from the Makefile",
        )
    if not may_use_nccl:
        return
    version = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""  # type: ignore[no-untyped-call]
    yield judged(
        "nccl",
        bool(version),
        version or "missing from this build of torch",
        "install torch's CUDA build; until then KV transfers use TCP",
        "warn",
    )
    yield from nccl_beside_tls(config)
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup]
    yield nccl_interfaces(environ.get("NCCL_SOCKET_IFNAME", ""), up)
    yield rdma(
        Path("/sys/class/infiniband"),
        Path("/dev/infiniband"),
        environ.get("NCCL_IB_DISABLE", "0") == "1",
        Locking(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], may_lock_memory()),
    )


def nccl_beside_tls(config: Config) -> Iterator[Check]:
    """Check whether KV uses NCCL between machines although members have certificates: NCCL cannot encrypt."""
    if not config.cluster.tls_certificate or "nccl" not in config.transfer.transports:
        return
    if "nccl" in config.transfer.plaintext_transports:
        yield Check(
            "nccl and tls", "ok", "KV leaves this machine over nccl unencrypted, as transfer.plaintext_transports says"
        )
        return
    yield Check(
        "nccl and tls",
        "warn",
        "KV between machines uses tcp, because nccl cannot encrypt and cluster.tls_certificate is set",
        "add nccl to transfer.plaintext_transports if the network between the GPUs is private",
    )


def nccl_interfaces(setting: str, up: Collection[str]) -> Check:
    """Check that NCCL_SOCKET_IFNAME selects a network: prefixes, after `^` excluded ones, after `=` whole names.

    Args:
        up: the interfaces of this machine that are up.
    """
    is_excluding, rest = setting.startswith("^"), setting.removeprefix("^")
    is_exact, listed = rest.startswith("="), [name for name in rest.removeprefix("=").split(",") if name]

    def is_named(interface: str) -> bool:
        return interface in listed if is_exact else any(interface.startswith(name) for name in listed)

    if listed:
        used = [name for name in up if is_named(name) != is_excluding]
    else:  # NCCL's default: the loopback and Docker's bridge come last
        used = [name for name in up if not name.startswith(("lo", "docker"))] or list(up)
    shown = f"NCCL_SOCKET_IFNAME={setting}" if setting else "NCCL_SOCKET_IFNAME is not set"
    if not used:
        return Check(
            "nccl network",
            "fail",
            f"{shown} matches no interface that is up ({names(up)})",
            "name one of those, or unset the variable so that NCCL chooses",
        )
    if all(name.startswith("lo") for name in used):
        return Check(
            "nccl network",
            "warn",
            f"{shown}: only the loopback, {names(used)}",
            "sufficient for one node; workers on other nodes need an interface between the nodes",
        )
    return Check("nccl network", "ok", f"{shown}: {names(used)}")


@dataclass(frozen=True, slots=True)
class Locking:
    """Permissions of a process to pin memory for RDMA; either suffices."""

    limit: int
    """RLIMIT_MEMLOCK: bytes that this process may lock; -1: unlimited."""
    is_capable: bool
    """The capability IPC_LOCK is effective in this process (CapEff)."""


def may_lock_memory(status: Path = Path("/proc/self/status")) -> bool:
    """Return whether this process has the capability IPC_LOCK. Added to a container, it is effective only for root."""
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE) if status.exists() else None
    return effective is not None and bool(int(effective[1], 16) >> CAP_IPC_LOCK & 1)


def rdma(devices: Path, nodes: Path, is_disabled: bool, locking: Locking) -> Check:
    """Check the machine's RDMA devices, and that this process may use them.

    Args:
        devices: the kernel's list of the devices.
        nodes: the folder of their device files.
        is_disabled: NCCL is configured not to use them.
    """
    states = {path.name: _rdma_state(path) for path in devices.glob("*")}
    active = [name for name, state in states.items() if "ACTIVE" in state]
    if not states:
        return Check("rdma", "ok", "no devices: NCCL uses TCP between nodes")
    found = ", ".join(f"{name} {state}" for name, state in sorted(states.items()))
    if is_disabled:
        return Check("rdma", "warn", f"{found}; NCCL_IB_DISABLE=1", "unset it, unless you want TCP")
    if not active:
        return Check("rdma", "warn", found, "no port is active: check cables, subnet manager and `ibstat`")
    if not any(nodes.glob("uverbs*")):
        return Check(
            "rdma",
            "warn",
            f"{found}, but {nodes} is empty",
            "request the RDMA resource of the cluster's device plugin (in the chart: worker.rdma.enabled)",
        )
    if 0 <= locking.limit < LOCKED_BYTES and not locking.is_capable:
        return Check(
            "rdma",
            "fail",
            f"{found}, but memory cannot be pinned: the memlock limit is {locking.limit // 1024} KiB, and CapEff has "
            "no IPC_LOCK (added to a container, it is effective only for root); NCCL would use TCP",
            "raise the limit: LimitMEMLOCK=infinity for the container runtime (containerd.service), `ulimit -l "
            "unlimited` elsewhere; or run as root with IPC_LOCK (in the chart: worker.rdma.asRoot); or set "
            "NCCL_IB_DISABLE=1 if you want TCP",
        )
    return Check("rdma", "ok", found)


def _rdma_state(device: Path) -> str:
    ports = sorted(device.glob("ports/*/state"))
    return " ".join(port.read_text().strip().partition(": ")[2] for port in ports) or "without ports"
