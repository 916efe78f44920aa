"""Runs in vLLM's environment: decode steps of a plain vLLM and of one with Baton's hooks, alternately, in one process.

`python -m tests.bench.vllm_peer FOLDER NUM_SEQUENCES NUM_STEPS KIND` prints, as JSON, the seconds of each pair of
steps. KIND is greedy, or drawn (temperature 0.9, top-p 0.95). The steps with hooks include the commands and the report
to a worker, here a process that reads and drops them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.vllm.arguments import ENVIRONMENT
from engine.vllm.messages import Add, Budget, Channel, Start

NUM_PROMPT_TOKENS = 64
DROPS = "import socket, sys\nend = socket.socket(fileno=int(sys.argv[1]))\nwhile end.recv(1 << 20): pass"


def main() -> None:
    folder, num_sequences, num_steps, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    own = Path(tempfile.mkdtemp())
    failures_path = str(own / "failures")
    settings: tuple[str, list[int], str] = (folder, [], failures_path)
    os.environ |= ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR", "BATON_VLLM_SAMPLER": json.dumps(settings)}
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.inputs import tokens_input

    from engine.vllm.hooks import HostedVllm

    arguments: dict[str, Any] = {
        "model": folder, "skip_tokenizer_init": True, "dtype": "float32", "block_size": 32, "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 29, "max_num_seqs": num_sequences, "enforce_eager": True,
        "disable_log_stats": True, "async_scheduling": False, "tensor_parallel_size": 1,
    }  # fmt: skip
    ours, theirs = socket.socketpair()
    reader = subprocess.Popen([sys.executable, "-c", DROPS, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
    channel = Channel(ours)
    failures = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    failures.setblocking(False)
    failures.bind(failures_path)
    hosted = HostedVllm(Start(arguments, [], {}), failures, os.memfd_create("bench"), channel.send)
    del arguments["tensor_parallel_size"]
    plain = LLMEngine.from_engine_args(EngineArgs(**arguments))
    drawn = {"temperature": 0.9, "top_p": 0.95} if kind == "drawn" else {"temperature": 0.0}
    most = num_steps + 50
    for number in range(num_sequences):
        prompt = [1 + (7 * number + place) % 400 for place in range(NUM_PROMPT_TOKENS)]
        asked = drawn | {"seed": number}
        hosted.add(Add(number, prompt, len(prompt), most, [], 0, "00", asked, "generate"))
        params = SamplingParams(**drawn, seed=number if kind == "drawn" else None, max_tokens=most, ignore_eos=True)
        plain.add_request(str(number), tokens_input(prompt), params)

    def hosted_step() -> None:
        for command in channel.receive(0):
            raise AssertionError(command)
        hosted.limit(Budget(512).num_tokens)
        stepped, failed = hosted.step()
        assert not failed
        channel.send(stepped)

    pairs = []
    for number in range(num_steps):
        took = {}
        for name, step in (("plain", plain.step), ("hosted", hosted_step))[:: 1 if number % 2 else -1]:
            began_s = time.perf_counter()
            step()
            took[name] = time.perf_counter() - began_s
        pairs.append((took["plain"], took["hosted"]))
    print(json.dumps(pairs[20:]))
    reader.kill()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
