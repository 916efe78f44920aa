"""Processes of a worker's other ranks.

    rank 0: the worker's process         ranks 1, 2, ...: children of it
    engine, gRPC, transfers              only `compute`, step by step
    samples                 --- pipe --> the step to compute
    sees all KV caches      <= shared => one cache each: shared memory on CPUs, CUDA IPC on GPUs
                            <- sums ---> within each layer: gloo on CPUs, NCCL on GPUs

Ranks live and die together: a rank that has ended, or failed within a step, leaves the others waiting in a collective
operation, and the state of the step is unknown. The worker's process then ends at once together with its children, and
its streams continue on other workers, as after any death of a worker. A rank that hangs makes the step hang, which the
engine's loop detects (`engine.step_timeout_s`); while ranks load, the controller detects it
(`cluster.start_timeout_s`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch._C._distributed_c10d import Store, TCPStore

from baton import garbage
from baton.errors import ModelLoadError
from baton.parent import die_with
from engine.core.runner import ignore_layer
from engine.model.adapters import AdapterForRanks
from engine.model.rank_step import RankStep
from engine.model.transformers_model import ModelRank

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from baton.config import EngineConfig, ModelConfig
    from engine.model.kv_cache import KVCache

logger = logging.getLogger(__name__)
LOAD_TIMEOUT = timedelta(hours=2)
"""Timeout of collective operations; it covers the slowest rank's load. The engine limits steps to a shorter time."""
WATCH_S = 1.0
END_S = 5.0


class OtherRanks:
    """Ranks 1, 2, ... of this process's model. They start to load at once; this process joins their group.

    Args:
        caches: the caches of all ranks, in order; they must outlive this object.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig, caches: Sequence[KVCache]) -> None:
        self._ending = threading.Event()
        self._ready = False
        self._sending = threading.Lock()
        """Held while a message is sent to all ranks: they receive messages in the same order."""
        with socket.create_server(("127.0.0.1", 0)) as server:  # TCPStore would listen on all addresses
            port = server.getsockname()[1]
            store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=server.detach())
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank, cache in enumerate(caches[1:], start=1):
            ours, theirs = spawn.Pipe()
            options = {"parent": os.getpid(), "port": port, "model": model, "engine": engine, "cache": cache}
            process = spawn.Process(target=_run, args=(rank, theirs), kwargs=options, name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        _join(0, len(caches), caches[0].device, store)

    def wait_ready(self) -> None:
        """Wait until all ranks have loaded their part of the model.

        Raises:
            ModelLoadError: a rank has ended instead.
        """
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            try:
                pipe.recv()
            except EOFError as error:
                raise ModelLoadError(f"{process.name} ended while it loaded its part; the log says why") from error
        self._ready = True

    @contextlib.contextmanager
    def computing(self, step: RankStep) -> Generator[None]:
        """Context manager: the other ranks compute `step`, and this process must do so too. An error ends the
        process.
        """
        try:
            with self._sending:
                for pipe in self._pipes:
                    pipe.send(step)
            yield
        except Exception:
            logger.exception("rank 0 failed within a step")
            self._die("rank 0 failed within a step")

    def load_adapter(self, adapter: AdapterForRanks) -> None:
        """Have the other ranks load an adapter before the steps that are computed from now on. May be called while a
        step is computed.
        """
        with self._sending:
            for pipe in self._pipes:
                pipe.send(adapter)

    def close(self) -> None:
        """Stop the processes; idempotent."""
        if self._ending.is_set():
            return
        self._ending.set()
        for pipe in self._pipes:
            pipe.close()
        deadline_s = time.monotonic() + END_S
        for process in self._processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            process.kill()
            process.join()
        if dist.get_backend() == "gloo":
            dist.destroy_process_group()  # with NCCL it might wait for the ended ranks; the group ends with the process

    def _watch(self) -> None:
        """End this process when another rank has ended."""
        sentinels = {process.sentinel: process for process in self._processes}
        while not self._ending.is_set():
            for sentinel in connection.wait(list(sentinels), WATCH_S):
                self._has_ended(sentinels[sentinel])  # type: ignore[index]

    def _has_ended(self, process: SpawnProcess) -> None:
        if self._ending.is_set():
            return  # `close` waits for it: of two waiters, one may miss the exit
        process.join()
        if not self._ready:  # `wait_ready` notices it and reports the reason
            self._ending.wait(2 * END_S)
        self._die(f"{process.name} ended with status {process.exitcode}")

    def _die(self, reason: str) -> None:
        if not self._ending.is_set():
            logger.critical("%s: this worker ends, since its ranks cannot continue", reason)
            os._exit(1)


def _run(
    rank: int, pipe: Connection, *, parent: int, port: int, model: ModelConfig, engine: EngineConfig, cache: KVCache
) -> None:
    """Run another rank, until rank 0 closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all ranks; rank 0 decides
    die_with(parent)
    store = TCPStore("127.0.0.1", port, is_master=False)
    _join(rank, engine.tensor_parallel, cache.device, store)
    model_rank = ModelRank(model, engine, cache)
    garbage.keep_what_is_loaded()
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            message = pipe.recv()
            if isinstance(message, AdapterForRanks):
                assert model_rank.adapters is not None, "this rank has no adapters"
                model_rank.adapters.load_from(message)
            else:
                model_rank.compute(message, ignore_layer)
    os._exit(0)  # without leaving the group, for which NCCL might wait


def _join(rank: int, num_ranks: int, device: torch.device, store: Store) -> None:
    """Make the ranks' group this process's default group, where transformers looks for it."""
    os.environ["LOCAL_RANK"] = str(rank)  # transformers uses this GPU
    on_gpu = device.type == "cuda"
    options: Any = None
    if on_gpu:
        torch.cuda.set_device(device)
        nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - a CPU build of torch has no such name
        options = nccl.Options()
        options._timeout = LOAD_TIMEOUT  # torch warns if it differs from `timeout`
        # The calls block, whatever the environment says: NCCL's non-blocking mode has hung in collectives, and is only
        # useful with a thread that aborts them, which ranks do not have.
        options.config.blocking = 1
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=LOAD_TIMEOUT,
        pg_options=options,
        device_id=device if on_gpu else None,
    )
