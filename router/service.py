"""The life of a request, told once and in order. The code below reads in the same order.

1. Admit. The door has told whose request it is (`router.admission.tenants`). Check model, id and sampling; take a
   slot, or refuse at once with Retry-After.
2. Write the prompt. Chat template and tokenizer; check length and vocabulary. From here on only token ids.
3. Key it. Chained block keys, seeded with the content id and the tenant's cache scope (`baton.blocks`).
4. Place, reserve, prefill, hand over, decode: `router.dispatch`, once for every choice, again when a worker fails.
5. Write the text. Incremental detokenization and stop strings (`router.answer`).
6. Settle. Usage, timing, metrics and the request's spans, exactly once, however the request ended: did it meet its
   objectives, and if not, which stage is to blame (`router.slo`).

Leaving the stream early, at any step, cancels the request everywhere: each step frees what it holds as it unwinds.

A client whose stream broke sends the request again, to any router, with its id and `resume_from`. Before step 4, its
choices then get the tokens that a router has noted of them (`router.request.resume_journal`), if one has; what is
missing is generated once more, and is the same, because a seed that no client has set comes from the request's id. In
step 5, what the client has is written again to the same state of text, and not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode

from baton.api import Chat, GenerateChunk, GenerateRequest, ModelCard, Prompt, Text, Timing, TokenIds, Usage
from baton.blocks import cache_seed
from baton.config import RouterConfig
from baton.errors import Conflict, InvalidRequest, Overloaded, Unsupported
from baton.messages import SequenceSpec
from baton.sampling import FinishReason, SamplingParams
from baton.tasks import cancel_and_wait
from baton.telemetry import logs, tracing
from baton.telemetry.instruments import Instruments
from kvstore.leases import Noted, RecordKey
from router.admission import (
    Claim,
    Limiter,
    ModelFacts,
    SloCounts,
    check_length,
    check_model,
    check_prompt,
    check_request_id,
    check_resume,
    check_vocabulary,
    claim_of,
    sampling_params,
    with_max_tokens,
)
from router.admission.tenants import DEFAULT_TENANT, Tenant
from router.answer import AnswerWriter, Piece
from router.dispatch.dispatcher import ChoiceRecord, Dispatcher
from router.prompt import Tokenizer
from router.request.resume_journal import Journal, digest_of
from router.slo import Outcome, Phase, Stage, Stages, blame, classify, phases

MAX_INLINE_CHARACTERS = 16_384
"""Prompts up to this length are tokenized on the event loop, in about 10 ms at most."""
REPLAY_TOKENS = 64
"""Tokens of a continued answer that are written to text before others have their turn on the event loop."""
TAKE_OVER_S = 5.0
"""How long a call that continues a request waits for the one before it to unwind."""
STAGE_LABELS = {stage: {"stage": stage.value} for stage in Stage}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The served model, as the router needs it."""

    card: ModelCard
    tokenizer: Tokenizer
    content_id: str


@dataclass(frozen=True, slots=True)
class Door:
    """How a request came, for its span."""

    address: str = ""
    """Empty: not known."""
    port: int = 0
    is_streamed: bool = True


UNKNOWN_DOOR = Door()


@dataclass(slots=True, kw_only=True)
class _Call:
    """A request in flight, as a later call finds it that continues it."""

    driver: asyncio.Task[Any]
    """The task that waits for the next chunk, or had the last one."""
    digest: bytes = b""
    """Of what determines its tokens; empty: not known yet."""
    records: list[ChoiceRecord] = field(default_factory=list)
    finish_reasons: list[FinishReason | None] = field(default_factory=list)
    """The engine's, by choice."""
    is_superseded: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, digest: bytes, num_choices: int, noted: dict[int, Noted]) -> None:
        """Args:
        noted: what has been generated already, by choice.
        """
        choices = [noted.get(index, Noted()) for index in range(num_choices)]
        self.digest = digest
        self.records = [ChoiceRecord(emitted=list(choice.token_ids)) for choice in choices]
        self.finish_reasons = [choice.finish_reason for choice in choices]

    def noted(self) -> dict[int, Noted]:
        """The same of this call."""
        ends = zip(self.records, self.finish_reasons, strict=True)
        return {index: Noted(tuple(record.emitted), end) for index, (record, end) in enumerate(ends)}


class RouterService:
    """Text in, text out, over the worker pools. gRPC and HTTP are thin doors to it.

    Args:
        slo_counts: filled in here.
        worker_limit: longest sequence that the workers can hold, in tokens; None: not known yet.
    """

    def __init__(
        self,
        model: LoadedModel,
        facts: ModelFacts,
        dispatcher: Dispatcher,
        limiter: Limiter,
        journal: Journal,
        instruments: Instruments,
        config: RouterConfig,
        slo_counts: SloCounts,
        worker_limit: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.model = model
        self._facts = facts
        self._worker_limit = worker_limit
        self._dispatcher = dispatcher
        self._limiter = limiter
        self._journal = journal
        self._instruments = instruments
        self._config = config
        self._slo_counts = slo_counts
        self._calls: dict[RecordKey, _Call] = {}
        self._taken_over: WeakSet[asyncio.Task[Any]] = WeakSet()
        """Tasks of calls that others continue."""
        self._cache_seeds: dict[str, bytes] = {}  # by cache scope: as many as the operator has named

    @property
    def facts(self) -> ModelFacts:
        """What requests are checked against: the model's limits, or the workers' where those are tighter."""
        limit = self._worker_limit()
        if limit is None or limit >= self._facts.max_model_len:
            return self._facts
        return replace(self._facts, max_model_len=limit)

    @property
    def card(self) -> ModelCard:
        return replace(self.model.card, max_model_len=self.facts.max_model_len)

    async def generate(
        self,
        request: GenerateRequest,
        trace: Context | None = None,
        tenant: Tenant = DEFAULT_TENANT,
        door: Door = UNKNOWN_DOOR,
    ) -> AsyncGenerator[GenerateChunk]:
        """Serves a request of `tenant`.

        Raises:
            InvalidRequest, Unsupported: before anything was placed; the client can mend it. Also, later: the answer is
                shorter than what `resume_from` says that the client has of it.
            Overloaded, NoWorker, WorkerFailed, TransferError: it could not be served.
            Conflict: another call has taken the request over.
        """
        facts = self.facts
        settle = _Settlement(self._instruments, self._slo_counts, request, facts.id, trace, tenant, door)
        driver = asyncio.current_task()
        assert driver is not None
        call = _Call(driver=driver)
        with settle:
            check_model(request.model, facts)
            check_request_id(request.request_id)
            claim = settle.claim = claim_of(request, tenant, self._config, settle.arrived_s)
            key = RecordKey(tenant.id, request.request_id or f"req-{uuid.uuid4().hex}")
            params = sampling_params(request.sampling, facts)
            check_resume(request, params)
            past = await self._take_over(key) if request.resume_from else None
            with self._limiter.slot(key.request_id, params.n, tenant), self._in_flight(key, call):
                prompt_ids = await self.tokenize(request.prompt, tenant)
                params = with_max_tokens(params, len(prompt_ids), facts)
                check_resume(request, params)
                spec = self._sequence_spec(key.request_id, prompt_ids, params, tenant)
                digest = digest_of(self.model.content_id, spec)
                call.begin(digest, params.n, await self._noted(key, digest, past) if request.resume_from else {})
                settle.begin(key.request_id, params, len(prompt_ids), call.records, request.resume_from)
                choices = [
                    self._choice(
                        replace(spec, choice_index=index) if index else spec,
                        *(claim, params, call, request.resume_from.get(index, 0), settle.trace),
                    )
                    for index in range(params.n)
                ]
                with self._journal.noting(key, digest, call.records, call.finish_reasons):
                    async with contextlib.aclosing(choices[0] if params.n == 1 else merged(choices)) as chunks:
                        async for chunk in chunks:
                            yield settle.book(replace(chunk, text="") if request.skip_text else chunk)
                            call.driver = asyncio.current_task() or driver
            self._limiter.record(time.monotonic() - settle.arrived_s)

    @contextlib.contextmanager
    def told_when_taken_over(self) -> Iterator[None]:
        """Around a call at a door. Raises Conflict when another call has ended it, to continue its request."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task not in self._taken_over:
                raise
            task.uncancel()
            raise Conflict("another call has taken this request over, to continue it") from None

    async def _take_over(self, key: RecordKey) -> _Call | None:
        """Ends the call that serves this request here, if one does: its client has lost it, noticed or not.

        Raises:
            Overloaded: it does not end in time.
        """
        past: _Call | None = None
        try:
            async with asyncio.timeout(TAKE_OVER_S):
                while (call := self._calls.get(key)) is not None:  # others may have come before: the last one wins
                    past = call
                    if not call.is_superseded:
                        call.is_superseded = call.driver.cancel()
                        self._taken_over.add(call.driver)
                    await call.ended.wait()
        except TimeoutError:
            raise Overloaded(f"an earlier call of {key.request_id!r} has not ended yet; try again later") from None
        return past

    @contextlib.contextmanager
    def _in_flight(self, key: RecordKey, call: _Call) -> Iterator[None]:
        self._calls[key] = call
        try:
            yield
        finally:
            del self._calls[key]
            call.ended.set()

    async def _noted(self, key: RecordKey, digest: bytes, past: _Call | None) -> dict[int, Noted]:
        """What has been generated of this request, by choice, as far as it is known here or to Redis."""
        if past is not None and past.digest == digest:
            return past.noted()
        return await self._journal.recall(key, digest)

    async def tokenize(self, prompt: Prompt, tenant: Tenant) -> tuple[int, ...]:
        """The prompt's token ids. Long texts are tokenized in a thread: they take many milliseconds.

        Raises:
            InvalidRequest: it is empty, too long, not renderable, or has ids outside the vocabulary.
        """
        num_characters = 0
        match prompt:
            case Text(text):
                num_characters = len(text)
            case Chat(messages):
                num_characters = sum(len(message.content) for message in messages)
        facts = self.facts
        check_length(num_characters, self.model.tokenizer.longest_token, facts)
        if num_characters > MAX_INLINE_CHARACTERS:
            token_ids = await asyncio.to_thread(self._encode, prompt, tenant.scope)
        else:
            token_ids = self._encode(prompt, tenant.scope)
        check_prompt(token_ids, facts)
        if not isinstance(prompt, Chat):  # a chat's are the vocabulary's; what is put around a text may be anything
            check_vocabulary(token_ids, facts)
        return token_ids

    def _encode(self, prompt: Prompt, scope: str) -> tuple[int, ...]:
        tokenizer = self.model.tokenizer
        match prompt:
            case Text(text):
                return tuple(tokenizer.encode(text))
            case Chat(messages):
                named = [
                    {"role": m.role, "content": m.content} | ({"name": m.name} if m.name else {}) for m in messages
                ]
                return tuple(tokenizer.encode_chat(named, scope=scope))
            case TokenIds(ids):
                return ids

    def _cache_seed(self, tenant: Tenant) -> bytes:
        seed = self._cache_seeds.get(tenant.scope)
        if seed is None:
            secret = self._config.cache_secret.encode()
            seed = self._cache_seeds[tenant.scope] = cache_seed(self.model.content_id, secret, tenant.scope)
        return seed

    def _sequence_spec(
        self, request_id: str, prompt_ids: tuple[int, ...], params: SamplingParams, tenant: Tenant
    ) -> SequenceSpec:
        top_k = params.top_k if 0 < params.top_k < self._facts.vocab_size else 0
        seed = self._seed(tenant, request_id) if params.seed is None else params.seed
        settled = replace(params, top_k=top_k, seed=seed, stop=(), n=1)
        return SequenceSpec(
            request_id=request_id,
            choice_index=0,
            token_ids=prompt_ids,
            num_prompt_tokens=len(prompt_ids),
            sampling=settled,
            cache_seed=self._cache_seed(tenant),
        )

    def _seed(self, tenant: Tenant, request_id: str) -> int:
        """Of a request without one: the same on every router and in every attempt, and not to be guessed."""
        name = f"seed\0{tenant.id}\0{request_id}"
        drawn = hmac.digest(self._config.cache_secret.encode(), name.encode(), "sha256")[:8]
        return max(-(2**63 - 1), int.from_bytes(drawn, "little", signed=True))

    async def _choice(
        self,
        spec: SequenceSpec,
        claim: Claim,
        params: SamplingParams,
        call: _Call,
        num_delivered: int,
        trace: Context,
    ) -> AsyncGenerator[GenerateChunk]:
        record, index = call.records[spec.choice_index], spec.choice_index
        writer = AnswerWriter(self.model.tokenizer, spec.token_ids, params.stop, num_delivered)
        known = tuple(record.emitted)
        for begin in range(0, len(known), REPLAY_TOKENS):
            end = begin + REPLAY_TOKENS
            piece = writer.push(known[begin:end], call.finish_reasons[index] if end >= len(known) else None)
            if chunk := self._chunk(spec, writer, piece):
                yield chunk
            if piece.finish_reason is not None:
                return
            await asyncio.sleep(0)
        async with contextlib.aclosing(self._dispatcher.run(spec, claim, record, trace)) as messages:
            async for message in messages:
                call.finish_reasons[index] = message.finish_reason
                piece = writer.push(message.token_ids, message.finish_reason)
                if piece.finish_reason is not None:
                    self._dispatcher.answered(spec, claim, record)
                if chunk := self._chunk(spec, writer, piece):
                    yield chunk
                if piece.finish_reason is not None:
                    return

    def _chunk(self, spec: SequenceSpec, writer: AnswerWriter, piece: Piece) -> GenerateChunk | None:
        """None: the client has all of it."""
        if piece.finish_reason is not None and writer.num_awaited:
            raise InvalidRequest(
                f"resume_from names {writer.num_awaited} tokens more of choice {spec.choice_index} than its answer "
                "has; send the request as it was, and the number of tokens that came",
                "resume_from",
            )
        if not piece.token_ids and piece.finish_reason is None:
            return None
        return GenerateChunk(
            request_id=spec.request_id,
            choice_index=spec.choice_index,
            text=piece.text,
            token_ids=piece.token_ids,
            finish_reason=piece.finish_reason,
        )


async def merged(choices: list[AsyncGenerator[GenerateChunk]]) -> AsyncGenerator[GenerateChunk]:
    """The chunks of all choices as they come. The first failure ends all of them."""
    queue: asyncio.Queue[GenerateChunk | Exception | None] = asyncio.Queue(maxsize=len(choices))

    async def pump(choice: AsyncGenerator[GenerateChunk]) -> None:
        try:
            async with contextlib.aclosing(choice) as chunks:
                async for chunk in chunks:
                    await queue.put(chunk)
            await queue.put(None)
        except Exception as error:  # raised by whoever reads the queue
            await queue.put(error)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        await cancel_and_wait(tasks)


class _Settlement:
    """A request's books: timestamps while it runs, one entry in metrics and trace when it ends."""

    def __init__(
        self,
        instruments: Instruments,
        slo_counts: SloCounts,
        request: GenerateRequest,
        model_id: str,
        trace: Context | None,
        tenant: Tenant,
        door: Door,
    ) -> None:
        self.arrived_s = time.monotonic()
        self._arrived_ns = time.time_ns()
        self.claim: Claim | None = None
        """Set once the request has been found to be one."""
        self._instruments = instruments
        self._slo_counts = slo_counts
        self._tenant = tenant
        self._continuous_usage = request.continuous_usage
        operation = "chat" if isinstance(request.prompt, Chat) else "text_completion"
        self._model = {"model": model_id}
        self._labels = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "baton",
            "gen_ai.request.model": model_id,
        }
        name = f"{operation} {model_id}"
        self._span = tracing.start_span(name, trace, self._labels, self._arrived_ns, SpanKind.SERVER)
        self.trace = tracing.context_of(self._span)
        logs.about(self._span.get_span_context())
        if self._span.is_recording():
            self._span.set_attribute("gen_ai.request.stream", door.is_streamed)
            if door.address:
                self._span.set_attributes({"server.address": door.address, "server.port": door.port})
            if (seed := request.sampling.get("seed")) is not None:
                self._span.set_attribute("gen_ai.request.seed", seed)
        self._records: list[ChoiceRecord] = []
        self._num_prompt_tokens = 0
        self._num_delivered = 0
        self._num_tokens: list[int] = []
        """Of this call, by choice."""
        self._finish_reasons: dict[int, FinishReason] = {}
        self._first_token_s = 0.0
        self._ended_s = 0.0
        """When the last chunk left, or the request failed; 0: not yet."""
        self._life: list[Phase] = []
        """The first choice's, and so the request's, once it has ended."""
        self._stages = Stages()
        self._num_unfinished = 0

    def begin(
        self,
        request_id: str,
        params: SamplingParams,
        num_prompt_tokens: int,
        records: list[ChoiceRecord],
        resume_from: Mapping[int, int],
    ) -> None:
        self._records = records
        self._num_delivered = sum(resume_from.values())
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = [0] * len(records)
        self._num_unfinished = len(records)
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    "gen_ai.response.id": request_id,
                    "gen_ai.response.model": self._model["model"],
                    "gen_ai.request.max_tokens": params.max_tokens or 0,
                    "gen_ai.request.temperature": params.temperature,
                    "gen_ai.request.top_p": params.top_p,
                    "gen_ai.request.top_k": float(params.top_k),
                    "gen_ai.request.choice.count": params.n,
                    "baton.request.num_stop_sequences": len(params.stop),
                }
            )

    def book(self, chunk: GenerateChunk) -> GenerateChunk:
        """Counts what leaves for the client; the request's last chunk gets usage and timing."""
        now = time.monotonic()
        self._first_token_s = self._first_token_s or now
        index, num_tokens = chunk.choice_index, len(chunk.token_ids)
        if num_tokens:
            stages = self._records[index].stages
            if self._num_tokens[index]:
                gap_s = (now - stages.last_token_s) / num_tokens
                self._instruments.inter_token_latency.record(gap_s, times=num_tokens)
            stages.last_token_s = now
            self._num_tokens[index] += num_tokens
        if chunk.finish_reason is not None:
            self._finish_reasons[index] = chunk.finish_reason
            self._num_unfinished -= 1
        if self._num_unfinished:
            return replace(chunk, usage=self.usage()) if self._continuous_usage else chunk
        self._end(now)
        return replace(chunk, usage=self.usage(), timing=self.timing())

    def usage(self) -> Usage:
        """Of the whole answer, with what the client had of it before."""
        num_tokens = self._num_delivered + sum(self._num_tokens)
        return Usage(self._num_prompt_tokens, num_tokens, self._records[0].num_cached_tokens or 0)

    @property
    def _after_first_s(self) -> float:
        """From the first token to the last; 0 where none came, because the client had them all."""
        return max(0.0, self._records[0].stages.last_token_s - self._first_token_s)

    def _itl_s(self) -> float:
        """Mean time between two tokens; 0 where there are no two."""
        num_gaps = self._num_tokens[0] - 1
        return self._after_first_s / num_gaps if num_gaps > 0 else 0.0

    def _end(self, now_s: float) -> None:
        self._ended_s = now_s
        self._life = self._life_until(now_s)
        self._stages = Stages.of(self._life, self._first_token_s)

    def _life_until(self, now_s: float) -> list[Phase]:
        noted = self._records[0].stages.until(now_s) if self._records else []
        return phases(self.arrived_s, self._first_token_s, now_s, noted)

    def timing(self) -> Timing:
        record, stages = self._records[0], self._stages
        return Timing(
            ttft_s=self._first_token_s - self.arrived_s,
            total_s=stages.total_s,
            queue_s=stages.queue_s,
            admission_s=stages.decode_admission_s,
            prefill_s=stages.prefill_s,
            transfer_s=stages.transfer_s,
            decode_s=stages.decode_s,
            recovery_s=stages.recovery_s,
            prefill_worker=record.prefill_worker,
            decode_worker=record.decode_worker,
            mode=record.mode,
            retries=record.retries,
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Leaving by GeneratorExit or CancelledError means that the client has left."""
        if error is None or (self._num_tokens and self._num_unfinished == 0):
            outcome = "ok"
        elif isinstance(error, Overloaded):
            outcome = "rejected"
        elif isinstance(error, (InvalidRequest, Unsupported)):
            outcome = "invalid"
        else:
            outcome = "error" if isinstance(error, Exception) else "cancelled"
        if not self._ended_s:
            self._end(time.monotonic())
        self._instruments.requests.add(1, {**self._model, "outcome": outcome})
        if outcome == "cancelled":
            self._labels["error.type"] = outcome
        elif outcome != "ok":
            self._labels["error.type"] = type(error).__name__
            self._span.set_status(StatusCode.ERROR, str(error))
        slo = self._book_slo(outcome)
        self._instruments.tenant_requests.add(1, {"tenant": self._tenant.id, "outcome": slo})
        self._instruments.request_duration.record(self._ended_s - self.arrived_s, self._labels)
        if self._first_token_s:
            self._book_served()
        if self._span.is_recording():
            self._write_span(outcome, slo)
        self._span.end(self._ns(self._ended_s))

    def _book_slo(self, outcome: str) -> str:
        """Classifies the request once, against its objectives."""
        if self.claim is None or outcome == "invalid":
            return outcome
        labels = {**self._model, "slo_class": self.claim.slo_class}
        if outcome == "ok":
            outcome = self._book_stages(self.claim, labels)
        self._slo_counts.met += outcome == Outcome.MET
        self._slo_counts.missed += outcome == "error"
        self._slo_counts.rejected += outcome == "rejected"
        self._instruments.requests_slo.add(1, {**labels, "outcome": outcome})
        return outcome

    def _book_stages(self, claim: Claim, labels: dict[str, str]) -> Outcome:
        """Of a request that was answered: where its time went, and whose fault it is that it was late."""
        objective, stages = claim.objective, self._stages
        for stage, seconds in stages.by_stage().items():
            self._instruments.stage_duration.record(seconds, STAGE_LABELS[stage])
        outcome = classify(self._first_token_s - self.arrived_s, self._itl_s(), stages.total_s, objective)
        if outcome is Outcome.MET:
            self._instruments.tokens_slo_met.add(sum(self._num_tokens), labels)
            return outcome
        self._slo_counts.missed += 1
        if outcome is Outcome.ITL_MISSED:
            stages = Stages.of(self._life_until(self._records[0].stages.last_token_s), self._first_token_s)
        stage = blame(outcome, stages, objective, self._num_tokens[0] - 1)
        self._instruments.slo_misses.add(1, {**labels, "outcome": outcome, "stage": stage})
        self._span.set_attribute("baton.slo.blame", stage)
        return outcome

    def _book_served(self) -> None:
        usage, record, instruments = self.usage(), self._records[0], self._instruments
        instruments.time_to_first_token.record(self._first_token_s - self.arrived_s, self._labels)
        if self._num_tokens[0] > 1:
            instruments.time_per_output_token.record(self._itl_s(), self._labels)
        num_new = sum(self._num_tokens)
        instruments.prompt_tokens.add(usage.prompt_tokens, self._model)
        instruments.prefix_hit_tokens.add(usage.cached_tokens, self._model)
        # Not less than what was found: another router may have seen that.
        instruments.prefix_ceiling_tokens.add(max(record.num_seen_tokens, usage.cached_tokens), self._model)
        instruments.generation_tokens.add(num_new, self._model)
        kinds = (("prompt", usage.prompt_tokens), ("cached", usage.cached_tokens), ("generated", num_new))
        for what, num_tokens in kinds:
            instruments.tenant_tokens.add(num_tokens, {"tenant": self._tenant.id, "kind": what})
        for reason in self._finish_reasons.values():
            instruments.finished_choices.add(1, {**self._model, "reason": reason.value})

    def _ns(self, at_s: float) -> int:
        """A time of the monotonic clock on the clock that traces have."""
        return self._arrived_ns + round((at_s - self.arrived_s) * 1e9)

    def _write_span(self, outcome: str, slo: str) -> None:
        """The request's span, and a child for each phase: they follow one another from its begin to its end."""
        for stage, begin_s, end_s in self._life:
            tracing.span_between(f"request.{stage}", self.trace, self._ns(begin_s), self._ns(end_s))
        attributes: dict[str, str | int | float] = {"baton.outcome": outcome, "baton.slo": slo}
        if error := self._labels.get("error.type"):
            attributes["error.type"] = error
        if self._first_token_s:
            usage, record = self.usage(), self._records[0]
            reasons = [reason.value for _, reason in sorted(self._finish_reasons.items())]
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
            attributes |= {
                "gen_ai.response.time_to_first_chunk": self._first_token_s - self.arrived_s,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "baton.mode": record.mode,
                "baton.prefill_worker": record.prefill_worker,
                "baton.decode_worker": record.decode_worker,
                "baton.prefix_source": record.source,
                "baton.retries": record.retries,
                **_decided(record),
            }
        self._span.set_attributes(attributes)


def _decided(record: ChoiceRecord) -> dict[str, float]:
    """What was predicted when the choice was placed, as span attributes."""
    if record.decision is None:
        return {}
    prediction = record.decision.prediction
    seconds = {
        "wait_s": prediction.wait_s,
        "room_s": prediction.room_s,
        "pull_s": prediction.pull_s,
        "compute_s": prediction.compute_s,
        "exposed_s": prediction.exposed_s,
        "step_s": prediction.step_s,
        "ttft_s": prediction.ttft_s,
    }
    return {f"baton.predicted.{name}": value for name, value in seconds.items()}
