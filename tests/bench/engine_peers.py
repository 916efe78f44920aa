"""Engines of other makes, each in a process of its own Python, which the environment variable BENCH_PEERS names."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.processes import tied
from tests.bench import engine_peer
from tests.bench.engine_sides import Measured
from tests.bench.peer import end
from tests.bench.report import Table

VARIABLE = "BENCH_PEERS"
PRECISIONS = {
    "openvino": ("float32", "default", engine_peer.WITHOUT_AMX),
    "llama.cpp": ("float32", "Q8_0", "Q4_1"),
    "vllm": ("float32", "bfloat16"),
}


class PeerSide:
    """A helper process that answers as `Side` says. Leaving the context ends it.

    Raises:
        RuntimeError: it cannot be started; the message says why.
    """

    def __init__(self, python: str, kind: str, precision: str, model: Path, scratch: Path) -> None:
        command = [python, engine_peer.__file__, kind, precision, str(model), str(scratch)]
        # It is started for nothing but its own packages.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            tied(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            opened = self._answer()
            if "error" in opened:
                raise RuntimeError(opened["error"])
        except RuntimeError:
            self.close()
            raise
        self.name, self.precision = opened["name"], opened["precision"]

    def prefill(self, prompts: list[list[int]]) -> Measured:
        """See `Side.prefill`."""
        return self._ask("prefill", prompts, 0)

    def decode(self, prompts: list[list[int]], num_steps: int) -> Measured:
        """See `Side.decode`."""
        return self._ask("decode", prompts, num_steps)

    def close(self) -> None:
        """Ends the process."""
        end(self._process)

    def _ask(self, op: str, prompts: list[list[int]], num_steps: int) -> Measured:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"op": op, "prompts": prompts, "num_steps": num_steps}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        answers = tuple(map(tuple, answer["answers"]))
        return Measured(answer["num_tokens"], answer["wall_s"], answer["cpu_s"], answers)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process ended with status {self._process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class Peers:
    sides: dict[str, PeerSide] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Why each of the others is not compared."""

    def table(self) -> Table:
        """Names each with its reason."""
        table = Table("Engines of other makes that were not compared", ("", "why"))
        table.rows += [(name, why) for name, why in self.absent.items()]
        if os.environ.get(VARIABLE) is None:
            names = ",".join(f"{kind}=PYTHON" for kind in PRECISIONS)
            table.note = f"{VARIABLE}={names} names the Pythons that have them"
        return table


@contextmanager
def started(model: Path, cache: Path, *, float32_only: bool = False) -> Iterator[Peers]:
    """Starts every peer that BENCH_PEERS names, once for each precision.

    Args:
        cache: folder for what they convert.
        float32_only: starts none of another precision.
    """
    peers = Peers()
    named = dict(part.partition("=")[::2] for part in os.environ.get(VARIABLE, "").split(",") if part)
    scratch = cache / "bench_peers" / model.name
    with ExitStack() as stack:
        for kind in dict.fromkeys((*PRECISIONS, *named)):
            if kind not in PRECISIONS:
                peers.absent[kind] = "this bench does not drive it"
            elif kind not in named:
                peers.absent[kind] = f"{VARIABLE} does not name it"
            else:
                precisions = PRECISIONS[kind][:1] if float32_only else PRECISIONS[kind]
                _start(stack, peers, named[kind], [(kind, precision) for precision in precisions], model, scratch)
        yield peers


def _start(
    stack: ExitStack, peers: Peers, python: str, wanted: Sequence[tuple[str, str]], model: Path, scratch: Path
) -> None:
    for kind, precision in wanted:
        name = f"{kind}, {precision}"
        try:
            side = PeerSide(python, kind, precision, model, scratch)
        except RuntimeError as error:
            peers.absent[name] = str(error)
        else:
            stack.callback(side.close)
            peers.sides[name] = side
