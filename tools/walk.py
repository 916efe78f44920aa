"""Lists the files that a prompt and a KV block visit, as a traced request shows: `python -m tools.walk`.

A router, a prefill worker and a decode worker run in this one process, with the default model, TCP between them and a
Redis of their own. One request is served disaggregated while every call of a Python function is recorded, in all
threads.

- A prompt's walk goes from the arrival of `Generate` to the first sampled token, without the rooms of the KV transfer.
- A block's walk goes from the start of that step to the decode worker's first step: engine, KV transfer, workers.

Functions that also run while nothing is asked (leases, heartbeats) are left out, and so is telemetry.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import grpc

from baton.cluster import Role
from baton.config import ClusterConfig, Config, EngineConfig, IndexConfig, ModelConfig, RouterConfig, TransferConfig
from baton.config import load as load_config
from baton.v1 import inference_pb2, inference_pb2_grpc
from deploy.embedded_redis import EmbeddedRedis
from deploy.models import cache_dir, resolve
from engine.core.serving import ServingEngine
from engine.engines import make_engine
from router.server import serve
from worker.process import running

ROOT = Path(__file__).parents[1]
PRODUCT = ("baton", "engine", "kvstore", "router", "prefill_worker", "decode_worker", "worker", "deploy", "lab")
KV_TRANSFER = tuple(f"kvstore/transfer/{room}/" for room in ("protocol", "connection", "pipeline", "copy", "transport"))
OF_A_BLOCK = ("engine/", "kvstore/transfer/", "prefill_worker/", "decode_worker/", "worker/")
IDLE_S = 12.0
"""Longer than twice the longest period of a background task, which then runs before the traced request, too."""

Function = tuple[str, str]
"""A file, relative to the repository, and the qualified name of a function in it."""


class Recorder:
    """Notes when each function of the product was called first and last, by `time.monotonic`."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Function]] = []
        self._names: dict[Any, Function | None] = {}

    def begin(self) -> None:
        sys.setprofile(self._on_event)
        threading.setprofile(self._on_event)

    def between(self, begin_s: float, end_s: float) -> list[Function]:
        """Functions in the order of their first call in that time."""
        return list(dict.fromkeys(function for at_s, function in self.calls if begin_s <= at_s <= end_s))

    def first(self, name: str, after_s: float = 0.0) -> float:
        return next(at_s for at_s, (_, called) in self.calls if called.endswith(name) and at_s > after_s)

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._names:
            self._names[code] = _function_of(code.co_filename, code.co_qualname)
        if function := self._names[code]:
            self.calls.append((time.monotonic(), function))


def _function_of(filename: str, name: str) -> Function | None:
    try:
        path = Path(filename).relative_to(ROOT)
    except ValueError:
        return None
    is_ours = path.parts[0] in PRODUCT and not {"v1", "v3"} & set(path.parts) and "telemetry" not in path.parts
    return (str(path), name) if is_ours else None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _ask(address: str, text: str) -> None:
    with grpc.insecure_channel(address) as channel:
        request = inference_pb2.GenerateRequest(text=text, sampling=inference_pb2.SamplingParams(max_tokens=4))
        for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120, wait_for_ready=True):
            pass


async def _trace(config: Config, engines: dict[Role, ServingEngine], recorder: Recorder) -> tuple[float, float]:
    """Returns when the cluster began to be idle, and when the traced request was sent."""
    stop = asyncio.Event()
    address = f"127.0.0.1:{config.cluster.grpc_port}"
    prefill = running(config, Role.PREFILL, "worker-0", "127.0.0.1", engines[Role.PREFILL])
    decode = running(config, Role.DECODE, "worker-1", "127.0.0.1", engines[Role.DECODE])
    async with prefill, decode, asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(config, stop))
        await asyncio.to_thread(
            _ask, address, "A first prompt, so that the two workers have met and everything is imported. " * 3
        )
        idle_s = time.monotonic()
        await asyncio.sleep(IDLE_S)
        asked_s = time.monotonic()
        await asyncio.to_thread(
            _ask, address, "Another prompt, of which no worker has anything in its cache, is what will be traced. " * 3
        )
        stop.set()
    return idle_s, asked_s


def walks() -> tuple[list[str], list[str]]:
    """The files of a prompt's walk and of a block's, in the order of the visits."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        redis = EmbeddedRedis(socket_path=Path(folder) / "redis")
        redis.start()
        try:
            model = resolve(ModelConfig(), cache_dir(load_config().cluster))
            config = Config(
                model=ModelConfig(path=str(model.path), served_name=model.served_name, revision=model.revision),
                engine=EngineConfig(num_blocks=256, max_num_seqs=8),
                transfer=TransferConfig(transports=("tcp",)),
                index=IndexConfig(redis_url=redis.url, renew_s=0.5, poll_s=0.2),
                router=RouterConfig(mode="disaggregated", id="router-0"),
                cluster=ClusterConfig(grpc_port=_free_port(), http_port=_free_port()),
            )
            engines = {role: make_engine(config, cache_dir(config.cluster)) for role in Role}
            recorder.begin()
            idle_s, asked_s = asyncio.run(_trace(config, engines, recorder))
        finally:
            sys.setprofile(None)
            redis.stop()
    idle = set(recorder.between(idle_s, asked_s))
    step_s = recorder.first("Runner.execute", asked_s)
    computed_s = recorder.first("Engine.commit", step_s)
    inserted_s = recorder.first("Engine.insert", step_s)
    decoded_s = recorder.first("Runner.execute", inserted_s)
    prompt = _files(recorder.between(asked_s, computed_s), idle, PRODUCT)
    block = _files(recorder.between(step_s, decoded_s), idle, OF_A_BLOCK)
    return [file for file in prompt if not file.startswith(KV_TRANSFER)], block


def _files(functions: list[Function], idle: set[Function], folders: tuple[str, ...]) -> list[str]:
    files = (file for file, name in functions if (file, name) not in idle)
    return list(dict.fromkeys(file for file in files if file.startswith(folders)))


def main() -> None:
    for what, files in zip(("A prompt", "A KV block"), walks(), strict=True):
        print(f"{what} visits {len(files)} files:")
        for file in files:
            print(f"  {file}")


if __name__ == "__main__":
    main()
