"""Load for a cluster of the arithmetic model: streams whose every token is known, and clients that go on asking."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from baton.v1 import inference_pb2, inference_pb2_grpc
from engine.testing import expected_tokens
from tests.support.asking import sampling

Requests = Generator[Callable[[], object]]
"""What a client asks: each is called to ask, wait and check, and the next one is made once it is over."""
JOIN_S = 120.0


@dataclass(kw_only=True)
class Stream:
    """A greedy request, read in a thread of its own from `start` on, and what has been heard of it so far.

    Attributes:
        inference: the router that is asked.
        fields: further ones of the message, which may replace the sampling.
        timeout_s: for the whole answer.
        arrived_s: when each token came, on the monotonic clock.
        timing, usage: those of the last message.
        error: how the call has failed, or was cancelled.
        first_s, took_s: seconds from sending to the first token and to the end; infinite: not so far.
    """

    inference: inference_pb2_grpc.InferenceStub
    prompt: list[int]
    max_tokens: int
    fields: dict[str, Any] = field(default_factory=dict)
    metadata: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 60.0
    tokens: list[int] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    timing: Any = None
    usage: Any = None
    error: Exception | None = None
    first_s: float = math.inf
    took_s: float = math.inf
    _call: Any = field(init=False, default=None)
    _thread: threading.Thread | None = field(init=False, default=None)

    def start(self) -> Self:
        """Sends the request, before anything that is sent later."""
        message = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=self.prompt),
            **{"sampling": sampling(self.max_tokens)} | self.fields,
        )
        sent_s = time.monotonic()
        self._call = self.inference.Generate(message, timeout=self.timeout_s, metadata=self.metadata)
        self._thread = threading.Thread(target=self._read, args=(sent_s,))
        self._thread.start()
        return self

    def cancel(self) -> None:
        """Hangs up."""
        self._call.cancel()

    def wait(self) -> Self:
        """Waits for the end, whatever it is; what was not started is started."""
        if self._thread is None:
            self.start()
        assert self._thread is not None
        self._thread.join(self.timeout_s)
        assert self.is_over, "a request hangs"
        return self

    def served(self) -> Self:
        """Waits for the end, and checks that all went well.

        Raises:
            AssertionError: the call has failed, or not every token is right.
        """
        self.wait()
        assert self.error is None, f"{type(self.error).__name__}: {self.error}"
        assert self.is_right, f"{len(self.tokens)} tokens, and wrong ones, for a prompt of {len(self.prompt)}"
        return self

    @property
    def is_over(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    @property
    def retries(self) -> int:
        return self.timing.retries if self.timing else 0

    @property
    def is_right(self) -> bool:
        """All tokens that were asked for have come, and are what the arithmetic model answers."""
        return self.tokens == expected_tokens(self.prompt, self.max_tokens)

    @property
    def longest_gap_s(self) -> float:
        return max(after - before for before, after in zip(self.arrived_s, self.arrived_s[1:], strict=False))

    def _read(self, sent_s: float) -> None:
        try:
            for message in self._call:
                now_s = time.monotonic()
                self.first_s = min(self.first_s, now_s - sent_s)
                self.tokens += message.token_ids
                self.arrived_s += [now_s] * len(message.token_ids)
                self.timing, self.usage = message.timing, message.usage
        except Exception as error:  # whatever a client may see
            self.error = error
        self.took_s = time.monotonic() - sent_s


class Clients:
    """Threads that ask, each one request after the other, while the block is entered. A request that fails fails it.

    Args:
        script: what a client asks, by its number.

    Attributes:
        num_served: how many requests have been answered, and rightly.
        failures: what was wrong with the others, and when; a client goes on after one.
        is_over: set when the block is left.
    """

    def __init__(self, script: Callable[[int], Requests], num_clients: int) -> None:
        self.num_served = 0
        self.failures: list[str] = []
        self.is_over = threading.Event()
        self._script = script
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._follow, args=(number,)) for number in range(num_clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_over.set()
        for thread in self._threads:
            thread.join(JOIN_S)
            assert not thread.is_alive(), "a request hangs"
        if kind is None:
            assert not self.failures, f"{len(self.failures)} failures: {self.failures[:5]}"

    def _follow(self, number: int) -> None:
        try:
            with contextlib.closing(self._script(number)) as script:
                for ask in script:
                    if self.is_over.is_set():
                        break
                    self._make(ask)
        except Exception as error:  # the script itself is wrong
            self._fail(error)

    def _make(self, ask: Callable[[], object]) -> None:
        try:
            ask()
        except Exception as error:  # whatever a client may see is a failure
            self._fail(error)
            self.is_over.wait(0.1)
        else:
            with self._lock:
                self.num_served += 1

    def _fail(self, error: Exception) -> None:
        self.failures.append(f"{datetime.now(UTC)}: {type(error).__name__}: {error}")
