"""One end of a hand-over over somebody else's transfer engine, run by a Python that has that engine:
`python -I transfer_engine_peer.py nixl|nixl-polled|mooncake source|destination`.

It needs the standard library, numpy and the engine. It answers one JSON object a line, as `tests.bench.peer.Peer` asks.
Each end has a pool like an inference engine's: layers x blocks x rows, registered once, a region a layer. The end that
acts answers `move`; the other one `begin` and `finish`, asked before and around it. Times are of the machine's
monotonic clock, so those of two processes compare; CPU seconds are of the process, all threads included.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

HOST = "127.0.0.1"
NUM_LAYERS = 30
NUM_BLOCKS = 160
ROW_BYTES = 24_576
STAMP_BYTES = 8
POLL_S = 0.0001
"""Between two looks at an engine that cannot be waited for."""
TIMEOUT_S = 60.0

Answer = dict[str, Any]


class End:
    """The pool of either end."""

    def __init__(self, role: str) -> None:
        self.is_source = role == "source"
        self.pool = np.zeros((NUM_LAYERS, NUM_BLOCKS, ROW_BYTES), np.uint8)
        if self.is_source:
            self.pool[:] = np.random.default_rng(5).integers(0, 256, self.pool.shape, np.uint8)
        self._cpu_s = 0.0

    @property
    def address(self) -> int:
        return int(self.pool.ctypes.data)

    def stamp(self, number: int) -> Answer:
        """Marks the end of every row, so that the destination can tell this transfer's rows from the last one's."""
        self.pool[:, :, -STAMP_BYTES:] = _stamp(number)
        return {}

    def check(self, block_ids: Sequence[int], number: int) -> Answer:
        """How many rows had not come when the destination was told that all had."""
        stamps = self.pool[:, block_ids, -STAMP_BYTES:]
        return {"num_missing": int((stamps != _stamp(number)).any(axis=2).sum())}

    def digest(self, block_ids: Sequence[int]) -> Answer:
        return {"digest": hashlib.blake2b(self.pool[:, block_ids].tobytes()).hexdigest()}

    def begin(self) -> Answer:
        self._cpu_s = time.process_time()
        return {}

    def used_s(self) -> float:
        return time.process_time() - self._cpu_s


class NixlEnd(End):
    """The destination reads, as vLLM's connector does: lists of all rows prepared once, then a request of indices.

    With NIXL's own defaults, though, where vLLM asks for four threads: more of them would only poll against each other
    on a machine with few cores.
    """

    progress_thread = True

    def __init__(self, role: str) -> None:
        super().__init__(role)
        nixl: Any = importlib.import_module("nixl_cu12")
        config = nixl.nixl_agent_config(enable_prog_thread=self.progress_thread)
        self._agent = nixl.nixl_agent(role, config)
        self._agent.register_memory([(layer.ctypes.data, layer.nbytes, 0, "") for layer in self.pool], "DRAM")
        self._source = self._local_rows = self._remote_rows = None

    def describe(self) -> Answer:
        return {"metadata": self._agent.get_agent_metadata().hex(), "address": self.address}

    def connect(self, metadata: str, address: int) -> Answer:
        self._source = self._agent.add_remote_agent(bytes.fromhex(metadata))
        if not self.is_source:
            self._local_rows = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", _rows(self.address), "DRAM")
            self._remote_rows = self._agent.prep_xfer_dlist(self._source, _rows(address), "DRAM")
        return {}

    def move(self, local: Sequence[int], remote: Sequence[int]) -> Answer:
        start_s = time.monotonic()
        self.begin()
        request = self._agent.make_prepped_xfer(
            "READ", self._local_rows, _indices(local), self._remote_rows, _indices(remote), b"read"
        )
        state = self._agent.transfer(request)
        while state == "PROC" and time.monotonic() < start_s + TIMEOUT_S:
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(request)
        end_s = time.monotonic()
        if state != "DONE":
            raise RuntimeError(f"NIXL's transfer ended as {state}")
        request.release()
        return {"start_s": start_s, "end_s": end_s, "cpu_s": self.used_s()}

    def finish(self) -> Answer:
        """Waits to be told that the blocks may be freed."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self._agent.get_new_notifs():
            if time.monotonic() > deadline:
                raise RuntimeError("NIXL's notification did not come")
            time.sleep(POLL_S)
        return {"cpu_s": self.used_s()}


class PolledNixlEnd(NixlEnd):
    """Progresses only when it is asked how far it is."""

    progress_thread = False


class MooncakeEnd(End):
    """The source writes and then tells the destination over a socket, as vLLM's connector does."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        engine: Any = importlib.import_module("mooncake.engine")
        self._engine = engine.TransferEngine()
        _succeed(self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""))
        layers = [(layer.ctypes.data, layer.nbytes) for layer in self.pool]
        _succeed(self._engine.batch_register_memory([a for a, _ in layers], [size for _, size in layers]))
        self._session, self._remote_address = "", 0
        self._listener = socket.create_server((HOST, 0))
        self._socket: socket.socket | None = None

    def describe(self) -> Answer:
        return {
            "session": f"{HOST}:{self._engine.get_rpc_port()}",
            "address": self.address,
            "port": self._listener.getsockname()[1],
        }

    def connect(self, session: str, address: int, port: int) -> Answer:
        self._session, self._remote_address = session, address
        if self.is_source:
            self._socket = socket.create_connection((HOST, port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return {}

    def move(self, local: Sequence[int], remote: Sequence[int]) -> Answer:
        assert self._socket
        start_s = time.monotonic()
        self.begin()
        sources, destinations = (
            (base + _indices(ids) * ROW_BYTES).tolist()
            for base, ids in ((self.address, local), (self._remote_address, remote))
        )
        sizes = [ROW_BYTES] * len(sources)
        _succeed(self._engine.batch_transfer_sync_write(self._session, sources, destinations, sizes))
        self._socket.sendall(b"!")
        return {"start_s": start_s, "cpu_s": self.used_s()}

    def finish(self) -> Answer:
        if self._socket is None:
            self._socket, _ = self._listener.accept()
        if not self._socket.recv(1):
            raise RuntimeError("the source is gone")
        return {"end_s": time.monotonic(), "cpu_s": self.used_s()}


def _stamp(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(number.to_bytes(STAMP_BYTES, "little"), np.uint8)


def _indices(block_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[Any]]:
    """Of the rows of these blocks, layer by layer."""
    layers = np.arange(NUM_LAYERS)[:, None] * NUM_BLOCKS
    return np.asarray((layers + np.asarray(block_ids)).ravel())


def _rows(address: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Of a whole pool: address, length, device."""
    rows = np.zeros((NUM_LAYERS * NUM_BLOCKS, 3), np.uint64)
    rows[:, 0] = address + np.arange(len(rows)) * ROW_BYTES
    rows[:, 1] = ROW_BYTES
    return rows


def _succeed(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"mooncake answered {status}")


def main(engine: str, role: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print must not answer for us
    end = {"nixl": NixlEnd, "nixl-polled": PolledNixlEnd, "mooncake": MooncakeEnd}[engine](role)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(getattr(end, question.pop("op"))(**question)), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # NIXL 1.5.1 crashes when the interpreter takes its agent down
