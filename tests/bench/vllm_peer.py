"""One side of the benchmark, in vLLM's environment: decode steps of a plain vLLM, or of one with Baton's hooks.

`python -m tests.bench.vllm_peer SIDE FOLDER NUM_SEQUENCES NUM_STEPS KIND`: for each line of its input it executes a
step and prints its seconds. SIDE is plain or hosted, KIND greedy or drawn (temperature 0.9, top-p 0.95). A step with
hooks includes the commands and the report to a worker, here a process that reads and drops them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.vllm.arguments import ENVIRONMENT
from engine.vllm.messages import Add, Channel, Start

NUM_PROMPT_TOKENS = 64
WARM_UP = 20
"""Steps before the first one that is measured: the prompts are among them."""
DROPS = "import socket, sys\nend = socket.socket(fileno=int(sys.argv[1]))\nwhile end.recv(1 << 20): pass"


def main() -> None:
    side, folder, num_sequences, num_steps, kind = (
        sys.argv[1],
        sys.argv[2],
        int(sys.argv[3]),
        int(sys.argv[4]),
        sys.argv[5],
    )
    failures_path = str(Path(tempfile.mkdtemp()) / "failures")
    settings: tuple[str, list[int], str] = (folder, [], failures_path)
    os.environ |= ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR", "BATON_VLLM_SAMPLER": json.dumps(settings)}
    arguments: dict[str, Any] = {
        "model": folder, "skip_tokenizer_init": True, "dtype": "float32", "block_size": 32, "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 29, "max_num_seqs": num_sequences, "enforce_eager": True,
        "disable_log_stats": True, "async_scheduling": False,
    }  # fmt: skip
    sampling = {"temperature": 0.9, "top_p": 0.95} if kind == "drawn" else {"temperature": 0.0}
    asked = [
        Add(number, [1 + (7 * number + place) % 400 for place in range(NUM_PROMPT_TOKENS)], NUM_PROMPT_TOKENS,
            num_steps + 50, [], 0, "00", sampling | {"seed": number}, "generate")
        for number in range(num_sequences)
    ]  # fmt: skip
    step = _plain(arguments, asked) if side == "plain" else _hosted(arguments, asked, failures_path)
    for _ in range(WARM_UP):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        began_s = time.perf_counter()
        step()
        print(time.perf_counter() - began_s, flush=True)
    os._exit(0)


def _plain(arguments: dict[str, Any], asked: list[Add]) -> Callable[[], object]:
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.inputs import tokens_input

    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    for each in asked:
        params = SamplingParams(**each.sampling, max_tokens=each.num_new_tokens, ignore_eos=True, detokenize=False)
        engine.add_request(str(each.key), tokens_input(each.token_ids), params)
    step: Callable[[], object] = engine.step
    return step


def _hosted(arguments: dict[str, Any], asked: list[Add], failures_path: str) -> Callable[[], object]:
    from engine.vllm.hooks import HostedVllm

    ours, theirs = socket.socketpair()
    subprocess.Popen([sys.executable, "-c", DROPS, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
    theirs.close()  # the reader ends with this process
    channel = Channel(ours)
    failures = Path(failures_path).open("w+b", buffering=0)  # noqa: SIM115 - it ends with this process
    start = Start(arguments | {"tensor_parallel_size": 1}, [], {})
    hosted = HostedVllm(start, failures, os.memfd_create("bench"), channel.send)
    for each in asked:
        hosted.add(each)

    def step() -> None:
        for command in channel.receive(0):
            raise AssertionError(command)
        hosted.limit(512)
        stepped, failed = hosted.step()
        assert not failed
        channel.send(stepped)

    return step


if __name__ == "__main__":
    main()
