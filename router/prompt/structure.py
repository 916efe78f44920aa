"""Structures are compiled before a worker sees them: what is invalid, too costly or unknown ends here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from baton.errors import InvalidRequest, Overloaded
from baton.structure import StructuredOutputs, invalid_structure

MAX_KNOWN = 256
"""Structures of which the verdict is kept."""
COMPILE_S = 1.0
"""A structure that takes longer is refused."""
WAIT_S = 10.0
"""How long a structure waits while others are compiled."""
START_S = 60.0


class StructureChecker:
    """Checks structures in a process of its own, one after the other: there are some with which compiling has no end,
    and some that end the compiler. The event loop goes on meanwhile.

    Args:
        tokenizer: the model's tokenizer.json.
        vocab_size: ids that the model has.
        eos_token_ids: tokens that end every answer.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._arguments = [str(tokenizer), str(vocab_size), *map(str, eos_token_ids)]
        self._thread = ThreadPoolExecutor(1, "structures")
        self._known: OrderedDict[StructuredOutputs, str] = OrderedDict()
        self._compiler: subprocess.Popen[str] | None = None

    async def check(self, structure: StructuredOutputs | None) -> None:
        """Returns if workers can serve the structure; None: any text is an answer.

        Raises:
            InvalidRequest: it is not valid, has what is not known, or takes too long to compile.
            Overloaded: many others wait to be compiled.
        """
        if structure is None:
            return
        problem = self._known.get(structure)
        if problem is None:
            try:
                async with asyncio.timeout(WAIT_S):
                    problem = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, structure)
            except TimeoutError:
                raise Overloaded("many structures wait to be compiled; try again later") from None
            self._known[structure] = problem
        self._known.move_to_end(structure)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if problem:
            raise InvalidRequest(problem, "structured_outputs")

    def close(self) -> None:
        """Ends the compiler's process. Nothing is checked any more."""
        self._thread.shutdown(cancel_futures=True)
        self._end()

    def _compile(self, structure: StructuredOutputs) -> str:
        """Returns what is wrong with a structure; empty: nothing."""
        if self._compiler is not None and self._compiler.poll() is not None:
            self._end()  # something else has ended it
        compiler = self._compiler or self._start()
        stdin, stdout = _pipes(compiler)
        try:
            stdin.write(json.dumps(dataclasses.asdict(structure)) + "\n")
            stdin.flush()
            answer = stdout.readline() if _is_readable(stdout, COMPILE_S) else None
        except OSError:
            answer = ""
        if answer:
            return str(json.loads(answer))
        self._end()
        told = f"it takes more than {COMPILE_S:g} s to compile" if answer is None else "it ends the compiler"
        return str(invalid_structure(told))

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "baton.grammar", str(os.getpid()), *self._arguments]
        self._compiler = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        _, stdout = _pipes(self._compiler)
        if not (_is_readable(stdout, START_S) and stdout.readline()):
            self._end()
            raise Overloaded("the compiler of structures does not start; try again later")
        return self._compiler

    def _end(self) -> None:
        compiler, self._compiler = self._compiler, None
        if compiler is None:
            return
        compiler.kill()
        compiler.wait()
        for pipe in _pipes(compiler):
            with contextlib.suppress(OSError):  # what is not written yet cannot be
                pipe.close()


def _pipes(compiler: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    return compiler.stdin, compiler.stdout


def _is_readable(stream: IO[str], within_s: float) -> bool:
    poll = select.poll()  # select() knows no file descriptor beyond 1,023
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(within_s * 1e3))
