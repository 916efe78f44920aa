"""Process that runs vLLM for one worker. It takes commands, executes a step, and reports it, in a loop.

`python -m engine.vllm.host SOCKET MEMORY FOLDER` gets the descriptors of the connection and of empty memory for the KV
cache, and a folder that is private to this process. It ends between two steps if the worker has closed the connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import BatonError
from engine.vllm.messages import (
    FAILURES,
    Abort,
    Add,
    Adopt,
    Budget,
    Channel,
    Failed,
    Insert,
    Lost,
    Message,
    Ping,
    PinPrefix,
    Pong,
    Start,
    Unpin,
)

if TYPE_CHECKING:
    from engine.vllm.hooks import HostedVllm

logger = logging.getLogger(__name__)
NUM_COMPILERS = 4
"""Threads that compile structures. The worker has compiled each structure before, so it is known to compile."""
PREPARING_S = 0.005
"""Interval in seconds at which the host checks whether a structure is compiled."""
MAX_REASON = 2000
"""Maximum length of an error's text, in characters."""


def main() -> None:
    """Run until the worker closes the connection."""
    connection, memory, folder = sys.argv[1:]
    channel = Channel(socket.socket(fileno=int(connection)))
    with (
        (Path(folder) / FAILURES).open("w+b", buffering=0) as failures,
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
    ):
        _run(channel, failures, int(memory))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for vLLM's threads and processes, which end with this one


def _run(channel: Channel, failures: FileIO, memory: int) -> None:
    start = next(channel.receive())
    assert isinstance(start, Start), start
    try:
        from engine.vllm.hooks import HostedVllm  # here, because it takes seconds and any error must be reported

        hosted = HostedVllm(start, failures, memory, channel.send)
        ready = hosted.ready()
    except Exception as error:  # vLLM's own code, and the model's
        logger.exception("vLLM could not be started")
        channel.send(Failed(-1, _text(error)))
        return
    channel.send(ready, hosted.descriptors)
    for descriptor in hosted.descriptors:  # the worker has its own now
        os.close(descriptor)
    try:
        Host(channel, hosted).run()
    except (EOFError, OSError):
        raise
    except Exception as error:  # after a failed step vLLM's scheduler and its model may disagree
        logger.exception("a step of vLLM failed")
        channel.send(Lost(_text(error)))
    finally:
        hosted.close()


class Host:
    """Loop that takes a worker's commands and executes vLLM's steps."""

    def __init__(self, channel: Channel, hosted: HostedVllm) -> None:
        self._channel = channel
        self._hosted = hosted
        self._prepared: deque[tuple[Add, str]] = deque()
        """Sequences whose compilation has ended, with the reason if it has failed. Compiler threads append to it."""
        self._preparing: set[int] = set()
        """Keys of the sequences whose structure is being compiled."""
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "compile")

    def run(self) -> None:
        """Execute steps. Raise EOFError when the worker has closed the connection."""
        while True:
            has_taken = False
            for command in self._channel.receive(self._wait_s()):
                self._take(command)
                has_taken = True
            self._add_prepared()
            if self._hosted.has_work:
                stepped, failed = self._hosted.step()
                # A worker that is late must not find vLLM further ahead than reservations allow (`admission.MARGIN`).
                self._channel.await_read()
                for each in failed:
                    self._channel.send(each)
                self._channel.send(stepped)
            elif has_taken:
                self._channel.send(self._hosted.update())  # no step will report what the commands have changed

    def _wait_s(self) -> float | None:
        """Return how long to wait for a command: 0 if there is work; None: without limit."""
        if self._hosted.has_work or self._prepared:
            return 0.0
        return PREPARING_S if self._preparing else None

    def _take(self, command: Message) -> None:
        match command:
            case Add():
                if "structured_outputs" in command.sampling:
                    self._preparing.add(command.key)
                    self._compilers.submit(self._prepare, command)
                else:
                    self._add(command)
            case Abort(key):
                self._preparing.discard(key)
                self._hosted.abort(key)
            case Insert():
                self._hosted.insert(command)
            case Adopt():
                self._hosted.adopt(command)
            case PinPrefix():
                self._hosted.pin_prefix(command)
            case Unpin(pin_id):
                self._hosted.unpin(pin_id)
            case Budget(num_tokens):
                self._hosted.limit(num_tokens)
            case Ping():
                self._channel.send(Pong())
            case _:
                raise AssertionError(command)

    def _prepare(self, command: Add) -> None:
        """Compile a sequence's structure, in another thread: that takes up to a second, and steps continue."""
        try:
            self._hosted.prepare(command)
            reason = ""
        except Exception as error:
            reason = _text(error)
        self._prepared.append((command, reason))

    def _add_prepared(self) -> None:
        while self._prepared:
            command, reason = self._prepared.popleft()
            if command.key not in self._preparing:
                continue  # it was aborted meanwhile
            self._preparing.discard(command.key)
            if reason:
                self._channel.send(Failed(command.key, reason))
            else:
                self._add(command)

    def _add(self, command: Add) -> None:
        try:
            self._hosted.add(command)
        except Exception as error:  # vLLM raises errors of many types
            self._channel.send(Failed(command.key, _text(error)))


def _text(error: Exception) -> str:
    name = "" if isinstance(error, BatonError) else f"{type(error).__name__}: "
    if callable(reasons := getattr(error, "errors", None)):  # pydantic's text has lines of links and of all arguments
        return f"{name}{'; '.join(each['msg'] for each in reasons())}"[:MAX_REASON]
    return f"{name}{error}"[:MAX_REASON]


if __name__ == "__main__":
    main()
