"""Helper processes of a benchmark: one JSON object a line in, one a line out."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any

from deploy.processes import tied

Handler = Callable[..., Awaitable[dict[str, Any]]]


class Peer:
    """A child process that runs `module`, which calls `serve`. Leaving the context ends it."""

    def __init__(self, module: str, *args: str) -> None:
        self._process = subprocess.Popen(
            tied([sys.executable, "-m", module, *args]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, op: str, **arguments: Any) -> None:
        """Asks without waiting; `answer` follows."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a helper process ended with status {self._process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.tell(op, **arguments)
        return self.answer()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end(self._process)


def end(process: subprocess.Popen[Any]) -> None:
    """Closes a helper's pipes, at which it ends, and kills one that does not."""
    assert process.stdin
    assert process.stdout
    process.stdin.close()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


async def serve(handlers: Mapping[str, Handler]) -> None:
    """Answers the parent until it closes the pipe. An exception ends the process, and with it the benchmark."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print must not answer for us
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        question = json.loads(line)
        print(json.dumps(await handlers[question.pop("op")](**question)), file=answers)
