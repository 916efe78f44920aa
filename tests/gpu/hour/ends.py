"""Two processes with a transport between them, of which one may die."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from kvstore.transfer.copy.kernel_choice import CHOSEN, why_not_kernels
from kvstore.transfer.protocol.chunk_header import Header
from kvstore.transfer.transport.base import RECEIVER, SENDER
from kvstore.transfer.transport.rendezvous import RendezvousStore
from kvstore.transfer.transport.select import KINDS, LocalRank, StagingPools, open_receiver, open_sender
from kvstore.transfer.transport.staging import Slot
from tests.gpu.hour.checks import FALLBACKS, NotRun, is_rehearsal
from tests.gpu.hour.settings import transfer_config

HOST = "127.0.0.1"
OP_TIMEOUT_S = 5.0
SLOT_BYTES = 2**20
Job = Callable[["Side"], Any]


class Side:
    """One of two processes. NCCL takes them for two hosts: it refuses two ranks on one GPU of one host."""

    def __init__(self, rank: int, store: RendezvousStore, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._store = store

    @property
    def sends(self) -> bool:
        return self.rank == SENDER

    def meet(self, where: str) -> None:
        """Returns once both have come."""
        self._store.set(f"meet/{where}/{self.rank}", "here")
        self._store.wait([f"meet/{where}/{1 - self.rank}"])

    def put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def open(self, kind: str, name: str = "pair", nccl_mode: str = "nonblocking-eager", **settings: Any) -> Any:
        """Opens this side's end; `name` keeps the keys of several apart."""
        limits = {"op_timeout_s": OP_TIMEOUT_S, "nccl_open_timeout_s": 40.0, "slot_bytes": SLOT_BYTES}
        config = transfer_config(**limits | settings)
        testing: Any = SimpleNamespace(nccl_mode=nccl_mode)
        local = LocalRank(host=HOST, device=self.device, staging=StagingPools(config), testing=testing)
        store: Any = PrefixStore(name, self._store)
        end = local.end(kind, store, config, HOST)
        return open_sender(kind, end) if self.sends else open_receiver(kind, end)

    def forget(self, name: str) -> None:
        """Drops the keys of a transport that both have closed: a rendezvous has room for those of few."""
        with self._store._changed:
            for key in [key for key in self._store._values if key.startswith(f"{name}/") or f"/{name}" in key]:
                del self._store._values[key]

    def end_session(self) -> None:
        """What the end of the control stream does."""
        self._store.close()

    def rehearse_on_cpu(self, kind: str) -> None:
        """In a rehearsal, kinds for main memory have their slots there."""
        if is_rehearsal() and not KINDS[kind].stages_on_gpu:
            self.device = torch.device("cpu")

    def still_computes(self) -> bool:
        return float(torch.ones(4, device=None if is_rehearsal() else self.device).sum().item()) == 4.0


def require_kind(kind: str) -> None:
    """Raises NotRun for a kind of transport that this version does not have."""
    if kind not in KINDS:
        raise NotRun(f"not built: this version has no {kind} transport")


def two(job: Job, timeout_s: float = 60.0, environment: dict[str, str] | None = None, victim: int = -1) -> list[Any]:
    """Runs a job on both sides, and returns what each reports, the sender's first; a victim's is None.

    Raises:
        AssertionError: a side has failed, or was not through in time.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes, outcomes = spawn.Pipe(), [spawn.Pipe(duplex=False) for _ in range(2)]
    sides: list[Any] = [
        spawn.Process(target=_side, args=(job, rank, pipes[rank], outcomes[rank][1], environment or {}), daemon=True)
        for rank in (SENDER, RECEIVER)
    ]
    for side in sides:
        side.start()
    for end in (*pipes, *(writer for _, writer in outcomes)):
        end.close()
    reports: list[Any] = [None, None]
    deadline = time.monotonic() + timeout_s
    try:
        for rank, (reader, _) in enumerate(outcomes):
            if rank != victim:
                assert reader.poll(max(0.0, deadline - time.monotonic())), (
                    f"side {rank} said nothing in {timeout_s:g} s"
                )
                ok, reports[rank], fallbacks = _received(reader)
                FALLBACKS.note(fallbacks)
                assert ok, f"side {rank}: {reports[rank]}"
        return reports
    finally:
        for side in sides:
            with contextlib.suppress(ProcessLookupError):
                os.kill(side.pid, signal.SIGKILL)
            side.join(10)


def _received(reader: Connection) -> tuple[bool, Any, list[str]]:
    try:
        found: tuple[bool, Any, list[str]] = reader.recv()
    except EOFError:
        return False, "it ended without a word", []
    return found


def _side(job: Job, rank: int, pipe: Connection, results: Connection, environment: dict[str, str]) -> None:
    os.environ.update({"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"})
    os.environ.update(environment)
    store = RendezvousStore(lambda key, value: pipe.send((key, value)), timeout_s=120.0)

    def deliver() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                store.deliver(*pipe.recv())

    threading.Thread(target=deliver, daemon=True).start()
    device = torch.device("cuda", 0)
    with contextlib.ExitStack() as stack:
        if is_rehearsal():
            _rehearse(stack)
        else:
            torch.cuda.set_device(device)
        try:
            report = (True, job(Side(rank, store, device)))
        except BaseException as error:
            report = (False, f"{type(error).__name__}: {error}")
        FALLBACKS.note(_copied_by_torch())
        results.send((*report, FALLBACKS.taken))
        time.sleep(0.2)
    os._exit(0)


def _copied_by_torch() -> list[str]:
    by_torch = [device for device, kernels in CHOSEN.items() if device.type == "cuda" and kernels is None]
    return [] if is_rehearsal() else [f"KV is copied by torch: {why_not_kernels(each)}" for each in by_torch]


def _rehearse(stack: contextlib.ExitStack) -> None:
    """A GPU and NCCL that are none; what is patched stays so until this process ends."""
    from tests.fakes.gpu import fake_gpus
    from tests.fakes.nccl import fake_nccl

    def patched(owner: Any, name: str, value: Any, raising: bool = True) -> None:
        setattr(owner, name, value)

    patch: Any = SimpleNamespace(setenv=os.environ.__setitem__, setattr=patched)
    stack.enter_context(fake_nccl(patch))
    stack.enter_context(fake_gpus(1))


def taken(slot: Slot | None) -> Slot:
    assert slot is not None, "no slot came free"
    return slot


def header_of(num_bytes: int) -> bytes:
    """The header of some chunk of this payload: a transport may read it."""
    return Header(flags=0, epoch=1, place=0, next_bytes=0, num_bytes=num_bytes).pack()


def weighted_sum(payload: torch.Tensor) -> int:
    """Sees an exchange of bytes, and is exact."""
    weights = torch.arange(len(payload), device=payload.device, dtype=torch.int64) + 1
    return int((payload.to(torch.int64) * weights).sum().item())


def free_bytes() -> int:
    return 0 if is_rehearsal() else int(torch.cuda.mem_get_info()[0])
