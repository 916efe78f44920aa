"""The host's process. Its worker starts it, watches it and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import baton
import engine
from baton import parent
from baton.config import child_environment
from baton.errors import ModelLoadError
from baton.own_folder import own_folder
from engine.vllm.arguments import ENVIRONMENT, PREFERRED
from engine.vllm.messages import (
    FAILURES,
    HEAD_BYTES,
    Channel,
    Failed,
    Message,
    Ready,
    Start,
    decoded,
    encoded,
    length_of,
)

logger = logging.getLogger(__name__)
END_S = 5.0
"""Seconds that a host has to end after its connection was closed. Then it is killed."""
SAMPLER = "BATON_VLLM_SAMPLER"
"""See `engine.vllm.sampling.SETTINGS`, which this process cannot import."""
DROPPED = "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD", "PYTHONDONTWRITEBYTECODE"
"""Variables of the worker's environment that the host must not inherit: they are for the worker's interpreter."""


class HostProcess:
    """A running host. `start` blocks until vLLM has loaded the model, which takes seconds to minutes."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: socket.socket,
        memory: int,
        folder: contextlib.ExitStack,
        ready: Ready,
    ) -> None:
        self.ready = ready
        self.descriptors: list[int] = []
        """Descriptors of the GPU's memory with the KV cache; see `GpuMemory.sizes`."""
        self.memory = memory
        """Descriptor of the memory in which the KV cache lies, if `Ready.memory` is set."""
        self._process = process
        self.connection = connection
        self._folder = folder
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @staticmethod
    def start(python: str, start: Start, cache: Path, num_threads: int) -> HostProcess:
        """Start a host and wait until it is ready.

        Args:
            python: interpreter of vLLM's environment.
            cache: folder in which vLLM keeps its compiled code.
            num_threads: threads that compute on a CPU, per rank.

        Raises:
            ModelLoadError: vLLM could not be started; the message says why.
        """
        stack = contextlib.ExitStack()
        folder = stack.enter_context(own_folder())  # one that a killed worker has left is removed when the next starts
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        memory = os.memfd_create("baton-vllm-kv")
        process = None
        try:
            with theirs:
                environment = _environment(folder, start, cache, num_threads)
                process = _spawn(python, theirs.fileno(), memory, folder, environment)
            ready = _answer(channel, start, process)
        except BaseException:
            ours.close()
            for descriptor in (memory, *channel.descriptors):
                os.close(descriptor)
            if process is not None:
                process.kill()
                process.wait()
            stack.close()
            raise
        ours.setblocking(False)
        host = HostProcess(process, ours, memory, stack, ready)
        host.descriptors = channel.descriptors
        return host

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Use the connection in this event loop, and close it on exit. A host can be entered only once."""
        self._reader, self._writer = await asyncio.open_connection(sock=self.connection)
        try:
            yield
        finally:
            self._writer.transport.abort()

    def send(self, message: Message) -> None:
        """Send a message without waiting. If the host has ended, `receive` raises the error."""
        assert self._writer is not None, "not connected"
        self._writer.write(encoded(message))

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            EOFError, OSError: the host has ended.
            ValueError: the host has sent something else than a message.
        """
        assert self._reader is not None, "not connected"
        head = await self._reader.readexactly(HEAD_BYTES)
        return decoded(await self._reader.readexactly(length_of(head)))

    def why_ended(self) -> str:
        """Return how the process has ended, for an error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        status = self._process.poll()
        return "its connection is closed" if status is None else f"its process has ended with status {status}"

    def close(self) -> None:
        """End the process: close the connection, and kill the process if it does not end within `END_S`."""
        self.connection.close()
        for descriptor in (self.memory, *self.descriptors):
            os.close(descriptor)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.close()


def _environment(folder: Path, start: Start, cache: Path, num_threads: int) -> dict[str, str]:
    """Return the host's environment. Its path has Baton's packages `baton` and `engine`, and no other of the worker's.

    The two packages are links in a folder. With the worker's own folder on the path, vLLM would import its packages.
    """
    links = folder / "packages"
    links.mkdir()
    for package in (baton, engine):
        (links / package.__name__).symlink_to(Path(package.__file__ or "").parent)
    sampler = (start.arguments["model"], start.eos_token_ids, str(folder / FAILURES))
    inherited: Mapping[str, str] = child_environment(os.environ)
    return {
        **PREFERRED,
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "vllm" / "inductor"),  # not in TMPDIR, which the host's end deletes
        **{name: value for name, value in inherited.items() if name not in DROPPED},
        **ENVIRONMENT,
        "PYTHONPATH": str(links),
        "TMPDIR": str(folder),  # vLLM leaves files there
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        SAMPLER: json.dumps(sampler),
    }


def _spawn(
    python: str, connection: int, memory: int, folder: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    command = [python, "-m", "engine.vllm.host", str(connection), str(memory), str(folder)]
    # The wrapper kills the host when this process ends, also if the host hangs; see `deploy.processes.tied`.
    wrapper = [sys.executable, "-I", "-S", parent.__file__, str(os.getpid()), "9", "", "--"]
    return subprocess.Popen(
        [*wrapper, *command], env=environment, cwd=folder, pass_fds=(connection, memory), stdin=subprocess.DEVNULL
    )


def _answer(channel: Channel, start: Start, process: subprocess.Popen[bytes]) -> Ready:
    try:
        channel.send(start)
        answer = next(channel.receive())
    except (EOFError, OSError) as error:
        status = process.wait()
        raise ModelLoadError(
            f"vLLM's process has ended with status {status} while it started; the log says why"
        ) from error
    except ValueError as error:
        raise ModelLoadError(f"vLLM's process cannot be understood: {error}") from error
    if isinstance(answer, Failed):
        raise ModelLoadError(f"vLLM cannot run this model: {answer.reason}")
    assert isinstance(answer, Ready), answer
    return answer
