"""Answers a request of any API, whole or as a stream.

An endpoint reads its body (`read_body`), gives the request an id (`named`), builds a `GenerateRequest` and asks for its
chunks (`chunks_of`), all within `Taking`. Then it answers with the chunks (`answered`), in the format of its API
(`AnswerForm`). Each of several prompts of one request is a separate request, and their answers are merged (`together`).

A chunk carries the new text of each channel: reasoning, text, tool calls. `Parts` puts them into one sequence, for APIs
whose answers are a list of items. The sequence depends on the answer alone, however its tokens are grouped into chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from baton.api import GenerateChunk, GenerateRequest, Timing, Usage
from baton.errors import BatonError, InvalidRequest, UnknownField, Unsupported
from baton.tasks import cancel_and_wait
from baton.telemetry import tracing
from baton.tools import ToolCallDelta
from router.admission.limits import Limits
from router.admission.tenants import Tenant
from router.api.exchange import (
    WAITING,
    EventStream,
    JsonAnswer,
    id_headers,
    id_of,
    ignored_of,
    limit_headers,
    timing_headers,
    unless_disconnected,
)
from router.api.fields import LEFT_OUT, UNSUPPORTED
from router.api.sessions import SESSION, NamesModel, opening_of
from router.models.table import ModelTable
from router.service import RouterService
from router.timeline.log import Ingress, RefusedBody

PATIENCE_S = 5.0
"""Longest wait for the first chunk before a stream's headers are sent. An error before the headers sets the status."""
WAIT_S = 10.0
"""Time between two comments of a stream that waits for its first token."""
OTHER = "other"
"""Metric label for field names that no API declares, because clients may send any name."""
_PLACE = re.compile(r"\[\d+\]")
MAX_PROMPTS = 128
MAX_AT_ONCE = 16
"""Maximum number of prompts of one request that are served concurrently."""

Start = Callable[[], AsyncGenerator[GenerateChunk]]


class PartKind(StrEnum):
    """Kind of a part."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class PartBegin:
    """Start of a part; all earlier parts are complete."""

    index: int
    """The part's position in the answer."""
    kind: PartKind
    call_id: str = ""
    name: str = ""
    """The tool's, if the part is a call."""


@dataclass(frozen=True, slots=True)
class PartMore:
    """More text of the part that started last."""

    index: int
    kind: PartKind
    text: str
    """New text; for a call, new text of its JSON arguments."""


@dataclass(frozen=True, slots=True)
class PartEnd:
    """End of the part that started last."""

    index: int
    kind: PartKind


PartEvent = PartBegin | PartMore | PartEnd


class Parts:
    """Splits the chunks of one choice into parts."""

    def __init__(self) -> None:
        self._open: PartBegin | None = None
        self._num_parts = 0
        self._num_characters = 0
        """Characters of the content so far."""

    def push(self, chunk: GenerateChunk) -> Iterator[PartEvent]:
        """Yield the events of a chunk. The iterator must be exhausted."""
        if chunk.reasoning:
            yield from self._more(PartKind.REASONING, chunk.reasoning)
        text, begin = chunk.text, self._num_characters
        self._num_characters += len(text)
        for call in chunk.tool_calls:
            if call.name:
                num_before = call.content_offset - begin
                if num_before > 0:
                    yield from self._more(PartKind.TEXT, text[:num_before])
                    text, begin = text[num_before:], call.content_offset
                yield from self._begin(PartKind.CALL, call)
            if call.arguments:
                yield from self._more(PartKind.CALL, call.arguments)
        if text:
            yield from self._more(PartKind.TEXT, text)

    def end(self) -> Iterator[PartEvent]:
        """Yield the end of the last part. The iterator must be exhausted."""
        if self._open is not None:
            yield PartEnd(self._open.index, self._open.kind)
            self._open = None

    def _more(self, kind: PartKind, text: str) -> Iterator[PartEvent]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        yield PartMore(self._num_parts - 1, kind, text)

    def _begin(self, kind: PartKind, call: ToolCallDelta | None = None) -> Iterator[PartEvent]:
        yield from self.end()
        named = (call.call_id, call.name) if call else ()
        self._open = PartBegin(self._num_parts, kind, *named)
        self._num_parts += 1
        yield self._open


class AnswerForm(Protocol):
    """Format in which an API writes the answer to one request."""

    async def whole(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> dict[str, Any]:
        """Return the whole answer, built from the first chunk and the rest. Always closes `chunks`."""
        ...

    def events(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> AsyncGenerator[bytes]:
        """Yield the server-sent events of the first chunk and of the rest. Always closes `chunks`.

        An error becomes an event as well, because the status is already sent.
        """
        ...

    def broken(self, error: BatonError) -> bytes:
        """Return the last event of a stream that this error ends, whatever events came before it."""
        ...


class Asked(NamedTuple):
    """Request that is ready to be answered. It keeps nothing of the body, because an answer may take minutes."""

    chunks: AsyncGenerator[GenerateChunk]
    form: AnswerForm
    is_streamed: bool


def chunks_of(
    service: RouterService,
    request: Request,
    asked: Sequence[GenerateRequest],
    *,
    is_streamed: bool,
    num_choices: int = 1,
) -> AsyncGenerator[GenerateChunk]:
    """Return the chunks of the answers to one prompt or several, generated for the request's tenant.

    Args:
        num_choices: number of choices per prompt.

    Raises:
        InvalidRequest: see `at_once`.
    """
    address, port = request.scope.get("server") or ("", 0)
    ingress = Ingress(address, port or 0, is_streamed)
    trace = tracing.from_metadata(request.headers.items())
    tenant: Tenant = request.state.tenant
    starts = [partial(service.generate, each, trace, tenant, ingress) for each in asked]
    num_answers = max(num_choices, asked[0].sampling.get("best_of") or 1)
    return together(
        starts, num_choices, at_once(tenant.tightest(service.name_of(asked[0].model)), len(asked), num_answers)
    )


async def answered(
    request: Request, chunks: AsyncGenerator[GenerateChunk], form: AnswerForm, is_streamed: bool
) -> Response:
    """Return the response. A client that disconnects ends the request everywhere.

    Raises:
        BatonError: the request is refused, or fails before its first chunk.
        ClientDisconnect: the client has disconnected.
    """
    if not is_streamed:
        body, headers = await unless_disconnected(request, _whole(chunks, form))
        return JsonAnswer(body, headers=id_headers(request) | headers)
    # Wait a moment for the first chunk, so that a refusal can still set the status code.
    first = asyncio.create_task(_first(chunks))
    try:
        await unless_disconnected(request, asyncio.wait((first,), timeout=PATIENCE_S))
    except BaseException:
        await cancel_and_wait((first,))
        raise
    ahead, headers = request.app.state.ahead, id_headers(request)
    if not first.done():
        return EventStream(_once_begun(first, chunks, form), headers, ahead, form.broken)
    headers |= limit_headers(first.result().quota)
    return EventStream(form.events(first.result(), chunks), headers, ahead, form.broken)


async def _first(chunks: AsyncGenerator[GenerateChunk]) -> GenerateChunk:
    return await anext(chunks)


async def _once_begun(
    first: asyncio.Task[GenerateChunk], chunks: AsyncGenerator[GenerateChunk], form: AnswerForm
) -> AsyncGenerator[bytes]:
    """Yield comments until the first chunk comes, so that no proxy takes the connection for dead; then the events.

    An error becomes an event as well.
    """
    try:
        while not first.done():
            yield WAITING
            await asyncio.wait((first,), timeout=WAIT_S)
        begun = first.result()
    except BatonError as error:
        yield form.broken(error)
        return
    finally:
        await cancel_and_wait((first,))
    async with contextlib.aclosing(form.events(begun, chunks)) as events:
        async for each in events:
            yield each


async def _whole(chunks: AsyncGenerator[GenerateChunk], form: AnswerForm) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the whole answer, and the headers with the tenant's remaining quota and the request's timing."""
    timings: list[Timing] = []

    async def noted() -> AsyncGenerator[GenerateChunk]:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if chunk.timing is not None:
                    timings.append(chunk.timing)
                yield chunk

    following = noted()
    first = await anext(following)
    body = await form.whole(first, following)
    return body, limit_headers(first.quota) | timing_headers(timings[0] if timings else None)


class Taking:
    """Context manager around reading a body and building its request. It is the only place that records their refusal.

    Args:
        operation: the operation, named as in the accounting of served requests.
    """

    __slots__ = ("_arrived_s", "_models", "_name", "_operation", "_request")

    def __init__(self, models: ModelTable, request: Request, operation: str) -> None:
        self._models = models
        self._request = request
        self._operation = operation

    def __enter__(self) -> Self:
        self._arrived_s, self._name = time.monotonic(), ""
        return self

    def service(self, body: NamesModel) -> RouterService:
        """Return the service of the model that a body names.

        Raises:
            ModelNotFound, InvalidRequest: see `ModelTable.service`.
        """
        request, self._name = self._request, body.model or ""

        def opening() -> str:
            return request.headers.get(SESSION) or opening_of(body)

        return self._models.service(self._name, request.state.tenant, opening)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        match error:
            case None:
                if names := ignored_of(self._request).names:
                    self._models.requests.ignored(map(self._label, names))
            case RequestValidationError():
                self._refused(refusal_of(error))
            case BatonError() | HTTPException():
                self._refused(error)

    def _refused(self, error: BatonError | HTTPException) -> None:
        param = error.param if isinstance(error, (InvalidRequest, Unsupported)) else None
        tenant: Tenant = self._request.state.tenant
        refused = RefusedBody(
            request_id=id_of(self._request),
            tenant=tenant.id,
            model=self._models.name_for(self._name, tenant) or self._models.name_for("", tenant),
            operation=self._operation,
            arrived_s=self._arrived_s,
            error=error,
            field=self._label(param) if param else "",
        )
        self._models.requests.refused(refused)

    def _label(self, name: str) -> str:
        """Return the name of a field without its path, or `other` if no API declares it."""
        own = _PLACE.sub("", name).rpartition(".")[2]
        return own if own in self._request.app.state.field_names else OTHER


def refusal_of(error: RequestValidationError) -> InvalidRequest | Unsupported:
    """Return the refusal of an invalid body; `param` is the path of its first invalid field."""
    first = error.errors()[0]
    where = first["loc"][first["loc"][:1] == ("body",) :]
    param = ""
    for part in where:
        param += f"[{part}]" if param and isinstance(part, int) else f"{'.' if param else ''}{part}"
    if first.get("type") in (UNSUPPORTED, LEFT_OUT):
        return Unsupported(f"{param} {first['msg']}", param)
    if first.get("type") == "extra_forbidden":
        return UnknownField(f"{param}: unknown field; remove it or correct its name", param)
    return InvalidRequest(f"{param or 'the body'}: {first['msg']}", param or None)


def at_once(limits: Limits, num_prompts: int, num_answers: int) -> int:
    """Return how many prompts of a request are served concurrently.

    Args:
        limits: the tenant's limits with the requested model.
        num_answers: answers that are generated for each prompt.

    Raises:
        InvalidRequest: the number of prompts exceeds the tenant's requests per minute.
    """
    limit = limits.requests_per_minute
    if limit is not None and num_prompts > limit:
        raise InvalidRequest(
            f"prompt holds {num_prompts} prompts, and each counts as a request: that is above this API key's limit of "
            f"{limit} requests per minute; send fewer",
            "prompt",
        )
    most = MAX_AT_ONCE if limits.max_in_flight is None else limits.max_in_flight // max(1, num_answers)
    return max(1, min(MAX_AT_ONCE, most))


def together(
    starts: Sequence[Start], num_choices: int, num_at_once: int = MAX_AT_ONCE
) -> AsyncGenerator[GenerateChunk]:
    """Return the chunks of all prompts, as they come. Choice `i` of prompt `p` is choice `p * num_choices + i`.

    The usage is the sum over all prompts so far; the timing is the first prompt's. If one prompt fails, or the reader
    closes the generator, all prompts end.

    Args:
        starts: for each prompt a function that starts its answers.
        num_at_once: prompts that are served concurrently; the others follow as these end.

    Raises:
        BatonError: the error of the first prompt that fails.
    """
    return starts[0]() if len(starts) == 1 else _merged(starts, num_choices, num_at_once)


async def _merged(starts: Sequence[Start], num_choices: int, num_at_once: int) -> AsyncGenerator[GenerateChunk]:
    queue: asyncio.Queue[tuple[int, GenerateChunk | Exception | None]] = asyncio.Queue(maxsize=MAX_AT_ONCE)
    seats = asyncio.Semaphore(num_at_once)

    async def pump(prompt: int) -> None:
        async with seats:
            try:
                async with contextlib.aclosing(starts[prompt]()) as chunks:
                    async for chunk in chunks:
                        await queue.put((prompt, chunk))
                await queue.put((prompt, None))
            except Exception as error:  # raised by the reader of the queue
                await queue.put((prompt, error))

    tasks = [asyncio.create_task(pump(prompt)) for prompt in range(len(starts))]
    usages = dict.fromkeys(range(len(starts)), Usage(0, 0, 0))
    num_left = len(starts)
    try:
        while num_left:
            prompt, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
                continue
            usages[prompt] = item.usage or usages[prompt]
            yield replace(
                item,
                choice_index=prompt * num_choices + item.choice_index,
                usage=_sum(usages.values()) if item.usage else None,
                timing=item.timing if prompt == 0 else None,
            )
    finally:
        await cancel_and_wait(tasks)


def _sum(usages: Iterable[Usage]) -> Usage:
    return Usage(*(sum(counts) for counts in zip(*map(astuple, usages), strict=True)))
