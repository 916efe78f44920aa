"""The life of a request, told once and in order. The code below reads in the same order.

1. Admit. The door has told whose request it is (`router.tenants`). Check model, id and sampling; take a slot, or refuse
   at once with Retry-After.
2. Write the prompt. Chat template and tokenizer; check length and vocabulary. From here on only token ids.
3. Key it. Chained block keys, seeded with the content id and the tenant's cache scope (`baton.blocks`).
4. Place, reserve, prefill, hand over, decode: `router.dispatch`, once for every choice, again when a worker fails.
5. Write the text. Incremental detokenization and stop strings (`router.text`).
6. Settle. Usage, timing, metrics and the request's span, exactly once, however the request ended.

Leaving the stream early, at any step, cancels the request everywhere: each step frees what it holds as it unwinds.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode

from baton.api import Chat, GenerateChunk, GenerateRequest, ModelCard, Prompt, Text, Timing, TokenIds, Usage
from baton.blocks import cache_seed
from baton.config import RouterConfig
from baton.errors import InvalidRequest, Overloaded, Unsupported
from baton.messages import SequenceSpec
from baton.sampling import SamplingParams
from baton.telemetry import tracing
from baton.telemetry.instruments import Instruments
from router.admission import (
    Claim,
    Limiter,
    ModelFacts,
    check_length,
    check_model,
    check_prompt,
    check_request_id,
    claim_of,
    sampling_params,
    with_max_tokens,
)
from router.dispatch import ChoiceRecord, Dispatcher
from router.tenants import DEFAULT_TENANT, Tenant
from router.text import AnswerWriter, Tokenizer

MAX_INLINE_CHARACTERS = 16_384
"""Prompts up to this length are tokenized on the event loop, in about 10 ms at most."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The served model, as the router needs it."""

    card: ModelCard
    tokenizer: Tokenizer
    content_id: str


class RouterService:
    """Text in, text out, over the worker pools. gRPC and HTTP are thin doors to it.

    Args:
        worker_limit: longest sequence that every worker can hold, in tokens; None: not known yet.
    """

    def __init__(
        self,
        model: LoadedModel,
        facts: ModelFacts,
        dispatcher: Dispatcher,
        limiter: Limiter,
        instruments: Instruments,
        config: RouterConfig,
        worker_limit: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.model = model
        self._facts = facts
        self._worker_limit = worker_limit
        self._dispatcher = dispatcher
        self._limiter = limiter
        self._instruments = instruments
        self._config = config
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
        self, request: GenerateRequest, trace: Context | None = None, tenant: Tenant = DEFAULT_TENANT
    ) -> AsyncGenerator[GenerateChunk]:
        """Serves a request of `tenant`.

        Raises:
            InvalidRequest, Unsupported: before anything was placed; the client can mend it.
            Overloaded, NoWorker, WorkerFailed, TransferError: it could not be served.
        """
        facts = self.facts
        settle = _Settlement(self._instruments, request, facts.id, trace)
        with settle:
            check_model(request.model, facts)
            check_request_id(request.request_id)
            claim = settle.claim = claim_of(request, tenant, self._config, settle.arrived_s)
            request_id = request.request_id or f"req-{uuid.uuid4().hex}"
            params = sampling_params(request.sampling, facts)
            with self._limiter.slot(request_id, params.n, tenant):
                prompt_ids = await self.tokenize(request.prompt)
                params = with_max_tokens(params, len(prompt_ids), facts)
                records = [ChoiceRecord() for _ in range(params.n)]
                settle.begin(request_id, params, len(prompt_ids), records)
                spec = self._sequence_spec(request_id, prompt_ids, params, tenant)
                choices = [
                    self._choice(
                        replace(spec, choice_index=index) if index else spec, claim, params, record, settle.trace
                    )
                    for index, record in enumerate(records)
                ]
                async with contextlib.aclosing(choices[0] if len(choices) == 1 else merged(choices)) as chunks:
                    async for chunk in chunks:
                        yield settle.book(replace(chunk, text="") if request.skip_text else chunk)
            self._limiter.record(time.monotonic() - settle.arrived_s)

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
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
            token_ids = await asyncio.to_thread(self._encode, prompt)
        else:
            token_ids = self._encode(prompt)
        check_prompt(token_ids, facts)
        return token_ids

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        tokenizer = self.model.tokenizer
        match prompt:
            case Text(text):
                return tuple(tokenizer.encode(text))
            case Chat(messages):
                named = [
                    {"role": m.role, "content": m.content} | ({"name": m.name} if m.name else {}) for m in messages
                ]
                return tuple(tokenizer.encode_chat(named))
            case TokenIds(ids):
                return ids

    def _cache_seed(self, tenant: Tenant) -> bytes:
        scope = tenant.cache_scope or tenant.id
        seed = self._cache_seeds.get(scope)
        if seed is None:
            secret = self._config.cache_secret.encode()
            seed = self._cache_seeds[scope] = cache_seed(self.model.content_id, secret, scope)
        return seed

    def _sequence_spec(
        self, request_id: str, prompt_ids: tuple[int, ...], params: SamplingParams, tenant: Tenant
    ) -> SequenceSpec:
        assert params.max_tokens is not None
        return SequenceSpec(
            request_id=request_id,
            choice_index=0,
            token_ids=prompt_ids,
            num_prompt_tokens=len(prompt_ids),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k if 0 < params.top_k < self._facts.vocab_size else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            # Without a seed one is drawn here, so that a choice placed again still draws the same tokens.
            seed=(secrets.randbits(63) if params.seed is None else params.seed) % 2**64,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            cache_seed=self._cache_seed(tenant),
        )

    async def _choice(
        self, spec: SequenceSpec, claim: Claim, params: SamplingParams, record: ChoiceRecord, trace: Context
    ) -> AsyncGenerator[GenerateChunk]:
        writer = AnswerWriter(self.model.tokenizer, spec.token_ids, params.stop)
        async with contextlib.aclosing(self._dispatcher.run(spec, claim, record, trace)) as messages:
            async for message in messages:
                piece = writer.push(message.token_ids, message.finish_reason)
                if piece.finish_reason is not None:
                    self._dispatcher.answered(claim, record)
                yield GenerateChunk(
                    spec.request_id, spec.choice_index, piece.text, piece.token_ids, piece.finish_reason
                )
                if piece.finish_reason is not None:
                    return


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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Settlement:
    """A request's books: timestamps while it runs, one entry in metrics and trace when it ends."""

    def __init__(
        self, instruments: Instruments, request: GenerateRequest, model_id: str, trace: Context | None
    ) -> None:
        self.arrived_s = time.monotonic()
        self.claim: Claim | None = None
        """Set once the request has been found to be one."""
        self._instruments = instruments
        self._operation = "chat" if isinstance(request.prompt, Chat) else "text_completion"
        self._labels = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "baton",
            "gen_ai.request.model": model_id,
        }
        self._span: Span = tracing.start_span(f"{self._operation} {model_id}", trace, self._labels)
        self.trace = tracing.context_of(self._span)
        self._records: list[ChoiceRecord] = []
        self._num_prompt_tokens = 0
        self._num_tokens: list[int] = []
        self._last_token_s: list[float] = []
        self._first_token_s = 0.0
        self._num_unfinished = 0

    def begin(
        self, request_id: str, params: SamplingParams, num_prompt_tokens: int, records: list[ChoiceRecord]
    ) -> None:
        self._records = records
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = [0] * len(records)
        self._last_token_s = [0.0] * len(records)
        self._num_unfinished = len(records)
        self._span.set_attributes(
            {
                "gen_ai.response.id": request_id,
                "gen_ai.request.max_tokens": params.max_tokens or 0,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.top_k": float(params.top_k),
                "gen_ai.request.choice.count": params.n,
            }
        )

    def book(self, chunk: GenerateChunk) -> GenerateChunk:
        """Counts what leaves for the client; the request's last chunk gets usage and timing."""
        now = time.monotonic()
        self._first_token_s = self._first_token_s or now
        index, num_tokens = chunk.choice_index, len(chunk.token_ids)
        if num_tokens:
            if self._num_tokens[index]:
                gap_s = (now - self._last_token_s[index]) / num_tokens
                for _ in range(num_tokens):
                    self._instruments.inter_token_latency.observe(gap_s)
            self._last_token_s[index] = now
            self._num_tokens[index] += num_tokens
        self._num_unfinished -= chunk.finish_reason is not None
        if self._num_unfinished:
            return chunk
        return replace(chunk, usage=self.usage(), timing=self.timing())

    def usage(self) -> Usage:
        return Usage(self._num_prompt_tokens, sum(self._num_tokens), self._records[0].num_cached_tokens or 0)

    @property
    def _after_first_s(self) -> float:
        """From the first token to the last."""
        return self._last_token_s[0] - self._first_token_s

    def timing(self) -> Timing:
        record = self._records[0]
        return Timing(
            ttft_s=self._first_token_s - self.arrived_s,
            total_s=time.monotonic() - self.arrived_s,
            queue_s=record.queue_s,
            prefill_s=record.prefill_s,
            transfer_s=record.transfer_s,
            decode_s=max(0.0, self._after_first_s - record.transfer_s),
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
        labels = {"model": self._labels["gen_ai.request.model"]}
        self._instruments.requests.add(1, {**labels, "outcome": outcome})
        if outcome == "cancelled":
            self._labels["error.type"] = outcome
        elif isinstance(error, Exception):
            self._labels["error.type"] = type(error).__name__
            self._span.set_status(StatusCode.ERROR, str(error))
        self._book_slo(outcome, labels)
        self._instruments.request_duration.record(time.monotonic() - self.arrived_s, self._labels)
        if self._first_token_s:
            self._book_served(labels)
        self._span.set_attribute("baton.outcome", outcome)
        self._span.end()

    def _book_slo(self, outcome: str, labels: dict[str, str]) -> None:
        """Classifies the request once, against its objectives."""
        if self.claim is None or outcome == "invalid":
            return
        if outcome == "ok":
            objective, itl_s = self.claim.objective, 0.0
            if self._num_tokens[0] > 1:
                itl_s = self._after_first_s / (self._num_tokens[0] - 1)
            outcome = "met"
            if self._first_token_s - self.arrived_s > objective.ttft_s:
                outcome = "ttft_missed"
            elif itl_s > objective.itl_s:
                outcome = "itl_missed"
        if outcome == "met":
            self._instruments.tokens_slo_met.add(sum(self._num_tokens), labels)
        self._instruments.requests_slo.add(1, {**labels, "slo_class": self.claim.slo_class, "outcome": outcome})
        self._span.set_attribute("baton.slo", outcome)

    def _book_served(self, labels: dict[str, str]) -> None:
        usage, timing = self.usage(), self.timing()
        self._instruments.time_to_first_token.record(timing.ttft_s, self._labels)
        self._instruments.decode_duration.record(self._after_first_s, labels)
        if self._num_tokens[0] > 1:
            self._instruments.time_per_output_token.record(
                self._after_first_s / (self._num_tokens[0] - 1), self._labels
            )
        self._instruments.prompt_tokens.add(usage.prompt_tokens, labels)
        self._instruments.prefix_hit_tokens.add(usage.cached_tokens, labels)
        self._instruments.generation_tokens.add(usage.completion_tokens, labels)
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "baton.mode": timing.mode,
                "baton.prefill_worker": timing.prefill_worker,
                "baton.decode_worker": timing.decode_worker,
                "baton.prefix_source": self._records[0].source,
                "baton.retries": timing.retries,
                **_decided(self._records[0]),
            }
        )


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
