"""Moderation of answers by a function of the operator: tokens wait for its verdict, and a veto ends the answer.

`router.moderation` names the function as `MODULE:FUNCTION`. The router calls it with an `AnswerSoFar` whenever the
number of tokens reaches a multiple of `router.moderation_tokens`, and at the end of the answer. The function returns
whether the answer so far may be shown. The points depend only on the answer's tokens, not on the chunks in which they
arrive. Tokens after the last allowed point wait in the router, and are dropped after a veto.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from baton.api import GenerateChunk
from baton.config import RouterConfig
from baton.errors import ConfigError
from baton.sampling import FinishReason
from baton.scores import NO_SCORES, TokenScores
from baton.telemetry.instruments import Instruments
from baton.turns import Turns
from router.answer import AnswerChunks, SentAnswer
from router.prompt import Tokenizer

logger = logging.getLogger(__name__)
MAX_THREADS = 16
"""Maximum number of concurrent calls of a judge that is a plain function; one less for a single tenant. A call that
never returns keeps its thread."""
MAX_WAITING_CHARACTERS = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSoFar:
    """Argument of a judge: an answer and its progress."""

    tenant: str
    request_id: str
    choice_index: int
    text: str
    """All output of the model, including markers and special tokens. Incomplete characters are U+FFFD."""
    num_tokens: int
    has_ended: bool


Judge: TypeAlias = Callable[[AnswerSoFar], "bool | Awaitable[bool]"]
"""Returns True if the answer so far may be shown, False if it must end."""


def load_judge(name: str) -> Judge:
    """Return the function that `MODULE:FUNCTION` names.

    Raises:
        ConfigError: it cannot be imported, or is not callable.
    """
    module, _, function = name.partition(":")
    try:
        judge: object = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module can raise anything when it is imported
        raise ConfigError(f"router.moderation: cannot load {name!r}, which must be MODULE:FUNCTION: {error}") from error
    if not callable(judge):
        raise ConfigError(f"router.moderation: {name!r} is not callable; name a function")
    found: Judge = judge
    return found


class Moderator:
    """Calls the operator's judge, and applies `router.moderation_on_failure` if it fails or times out.

    Args:
        judge: a plain function runs in threads, a coroutine function on the event loop.
        config: sets the interval, the timeout and the behaviour after a failure.
    """

    def __init__(self, judge: Judge, config: RouterConfig, instruments: Instruments) -> None:
        self._judge = judge
        call = getattr(judge, "__call__", None)  # noqa: B004 - an object may be called as a coroutine
        self._is_coroutine = inspect.iscoroutinefunction(judge) or inspect.iscoroutinefunction(call)
        self._timeout_s = config.moderation_timeout_s
        self._passes_on_failure = config.moderation_on_failure == "pass"
        self._verdicts = instruments.moderation_verdicts
        self._turns = Turns(MAX_THREADS, MAX_WAITING_CHARACTERS)
        self.every_tokens = config.moderation_tokens
        """Number of tokens between two verdicts."""

    @staticmethod
    def of(config: RouterConfig, instruments: Instruments) -> Moderator | None:
        """Return the configured moderator; None: none is configured.

        Raises:
            ConfigError: see `load_judge`.
        """
        return Moderator(load_judge(config.moderation), config, instruments) if config.moderation else None

    async def allows(self, answer: AnswerSoFar) -> bool:
        """Return whether the answer so far may be shown."""
        try:
            async with asyncio.timeout(self._timeout_s):
                verdict = await self._verdict(answer)
            if not isinstance(verdict, bool):
                raise TypeError(f"it returned {type(verdict).__name__} instead of bool")
        except Exception as error:  # the operator's function may raise anything
            logger.error("moderation of %s failed: %r", answer.request_id, error)
            self._verdicts.add(1, {"verdict": "failed"})
            return self._passes_on_failure
        self._verdicts.add(1, {"verdict": "allowed" if verdict else "vetoed"})
        return verdict

    async def _verdict(self, answer: AnswerSoFar) -> object:
        if self._is_coroutine:
            return await cast("Awaitable[bool]", self._judge(answer))
        await self._turns.take(answer.tenant, len(answer.text) + 1)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()

        def end(verdict: object, error: Exception | None) -> None:
            self._turns.end(answer.tenant)
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(verdict)

        def judge() -> None:
            verdict: object = None
            error: Exception | None = None
            try:
                verdict = self._judge(answer)
            except BaseException as raised:  # including SystemExit and KeyboardInterrupt
                error = RuntimeError(repr(raised))
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(end, verdict, error)

        # A daemon thread and not a pool: the interpreter waits for a pool's threads at exit, and a judge may never
        # return.
        threading.Thread(target=judge, name="moderation", daemon=True).start()
        return await future


class ModeratedAnswer(SentAnswer):
    """Writer of one choice's answer whose chunks wait for the moderator's verdicts.

    A replay is judged again, because the number of tokens that the client claims to have may be wrong.

    Args:
        chunks: writer of the answer.
        tenant: id of the tenant.
    """

    def __init__(self, chunks: AnswerChunks, moderator: Moderator, tokenizer: Tokenizer, tenant: str) -> None:
        super().__init__(chunks)
        self._moderator = moderator
        self._tokenizer = tokenizer
        self._tenant = tenant
        self._token_ids: list[int] = []
        self._held: list[GenerateChunk] = []
        """Chunks that wait for a verdict."""
        self._num_reasoning = 0
        """Reasoning tokens in the chunks that were sent."""
        self._is_vetoed = False

    @property
    def has_ended(self) -> bool:
        """True if the client needs no more tokens."""
        return self._is_vetoed or self._chunks.has_ended

    async def write(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None, scores: TokenScores = NO_SCORES
    ) -> Sequence[GenerateChunk]:
        """See `SentAnswer.write`."""
        ready: list[GenerateChunk] = []
        begin, every = 0, self._moderator.every_tokens
        while True:
            end = min(len(token_ids), begin + every - self.num_tokens % every)
            reason = finish_reason if end == len(token_ids) else None
            part = token_ids[begin:end]
            chunk = self._chunks.write(part, reason, scores.part(begin, end) if scores else scores)
            self._token_ids += part
            if chunk is not None:
                self._held.append(chunk)
            if self._chunks.has_ended or (part and self.num_tokens % every == 0):
                ready += await self._judged()
            begin = end
            if self.has_ended or begin >= len(token_ids):
                return ready

    async def _judged(self) -> list[GenerateChunk]:
        """Return the held chunks if they are allowed, else the chunk that ends the answer."""
        num_tokens = self._chunks.num_kept
        so_far = AnswerSoFar(
            tenant=self._tenant,
            request_id=self._chunks.request_id,
            choice_index=self._chunks.choice_index,
            text=self._tokenizer.decode_all(self._token_ids[:num_tokens]),
            num_tokens=num_tokens,
            has_ended=self._chunks.has_ended,
        )
        held, self._held = self._held, []
        if not await self._moderator.allows(so_far):
            self._is_vetoed = True
            return [self._chunks.vetoed(self._num_reasoning)]
        self._num_reasoning = held[-1].num_reasoning_tokens if held else self._num_reasoning
        return held
