"""Serves a request from its arrival to its end. The code below reads in the order of these steps.

1. Admit. The API has identified the tenant (`router.admission.tenants`) and the model (`router.models.table`). Check id
   and sampling; if the model sleeps, wait until it is awake (`router.serve.holding`); take a slot; and check the
   tenant's known limits (`router.admission.accounts`), or refuse at once with Retry-After.
2. Write the prompt. Chat template and tokenizer; check length and vocabulary (`router.prompt`), and charge it to the
   tenant. A worker looks at its images, whose tokens take their places (`router.serve.images`). From here on there
   are only token ids; the images' bytes stay until the request ends, for workers that lack them.
3. Key it. Chained block keys, seeded with the content id and the tenant's cache scope (`router.prompt.sequence`).
4. Place, reserve, prefill, transfer, decode: `router.serve` does this for all choices, and retries when a worker
   fails.
5. Write the text. Incremental detokenization and stop strings (`router.answer`). If moderation is configured, new text
   waits for its verdict (`router.request.moderation`).
6. Report. Usage, timing, metrics, spans, and whether it met its objectives and which stage is to blame if not, are
   derived once from the request's timeline, however it ended (`router.timeline`).

Closing the stream early, at any step, cancels the request everywhere: each step frees what it holds as it unwinds.

After a broken stream the client sends the request again, to any router, with its id and `resume_from`. Before step 4
its choices then get the tokens that a router has recorded for them (`router.request.resume`). Tokens that were not
recorded are regenerated and come out identical, because without a client seed the seed is derived from the request id.
Step 5 replays the tokens that the client already has, to restore the state of the text, and does not send them.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

from opentelemetry.context import Context

from baton.api import Chat, GenerateChunk, GenerateRequest, ModelCard, PromptInput, PromptScores, Truncation
from baton.config import RouterConfig
from baton.errors import InvalidRequest
from baton.messages import Adapter, NewTokens, PlacedImage, SequenceSpec
from baton.registered_adapters import NO_ADAPTERS, Adapters, RegisteredAdapter
from baton.sampling import SamplingParams
from baton.telemetry.instruments import Instruments
from kvstore.leases import Noted, RecordKey
from router.admission import (
    Accounts,
    Claim,
    ImageMemory,
    Limiter,
    ModelFacts,
    SloCounts,
    check_model,
    check_prompt,
    check_request_id,
    check_resume,
    check_special,
    claim_of,
    sampling_params,
    truncation_of,
    with_lengths,
)
from router.admission.tenants import DEFAULT_TENANT, Tenant
from router.answer import (
    AnswerChunks,
    AnswerPlan,
    AnswerSelection,
    AnswerWriter,
    SentAnswer,
    with_reasoning,
    with_tool_choice,
)
from router.prompt import PromptEncoder, SequenceBuilder, StructureChecker, in_tokens, with_images
from router.request.model import LoadedModel
from router.request.moderation import ModeratedAnswer, Moderator
from router.request.resume import Call, CallsInFlight, Journal, digest_of, only_delivered, with_delivered
from router.serve import (
    Choice,
    ChoiceDriver,
    ChoiceGroup,
    HeldRequests,
    Holding,
    ImageLooker,
    RequestImages,
    prompt_bytes,
)
from router.timeline.log import UNKNOWN_INGRESS, Ingress, Recording, RequestLog, Served
from router.timeline.usage_log import UsageBook


class _Prompt(NamedTuple):
    """A prompt as workers get it."""

    token_ids: tuple[int, ...]
    placed: tuple[PlacedImage, ...] = ()
    images: RequestImages | None = None
    """The images themselves; None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Dependencies that all models of a router share: limits, accounts and records of requests."""

    config: RouterConfig
    instruments: Instruments
    accounts: Accounts
    limiter: Limiter
    held: HeldRequests
    image_memory: ImageMemory
    moderator: Moderator | None
    requests: RequestLog
    calls: CallsInFlight

    @staticmethod
    def of(config: RouterConfig, instruments: Instruments, accounts: Accounts, usage_book: UsageBook) -> Front:
        """Return the front of a router with this configuration.

        Raises:
            ConfigError: the function that `router.moderation` names cannot be loaded.
        """
        limiter = Limiter(config.max_in_flight)
        return Front(
            config=config,
            instruments=instruments,
            accounts=accounts,
            limiter=limiter,
            held=HeldRequests(config, limiter),
            image_memory=ImageMemory(config),
            moderator=Moderator.of(config, instruments),
            requests=RequestLog(config.id, instruments=instruments, usage_book=usage_book),
            calls=CallsInFlight(),
        )


class RouterService:
    """Serves requests of one model on its worker pools: text in, text out. gRPC and HTTP are thin layers over it.

    Args:
        slo_counts: the service counts the model's requests in it.
        worker_limit: returns the longest sequence that the workers can hold, in tokens; None: not known yet.
        adapters: returns the registered LoRA adapters, which clients request as models.
    """

    def __init__(
        self,
        model: LoadedModel,
        front: Front,
        *,
        driver: ChoiceDriver,
        holding: Holding,
        looker: ImageLooker,
        journal: Journal,
        slo_counts: SloCounts,
        worker_limit: Callable[[], int | None] = lambda: None,
        adapters: Callable[[], Adapters] = lambda: NO_ADAPTERS,
    ) -> None:
        self.model = model
        self._requests = front.requests
        self._calls = front.calls
        self._image_memory = front.image_memory
        self._limiter = front.limiter
        self._accounts = front.accounts
        self._config = front.config
        self._moderator = front.moderator
        self._slo_counts = slo_counts
        self._worker_limit = worker_limit
        self._adapters = adapters
        self._driver = driver
        self._holding = holding
        self._looker = looker
        self._journal = journal
        self._encoder = PromptEncoder(model.tokenizer)
        self._structures = StructureChecker(
            model.tokenizer.folder / "tokenizer.json", model.facts.vocab_size, model.tokenizer.eos_ids
        )
        self._sequences = SequenceBuilder(model.content_id, model.facts.vocab_size, front.config.cache_secret)

    async def start(self) -> None:
        """Start the processes that the first requests would otherwise wait for.

        Raises:
            ModelLoadError: the model's chat template is not valid.
        """
        await self._encoder.start()

    def stop_held(self) -> None:
        """End the requests that wait until the model is awake: the router stops."""
        self._holding.stop()

    def close(self) -> None:
        """Stop the service's processes and threads. It cannot serve afterwards."""
        self._encoder.close()
        self._structures.close()

    @property
    def is_crowded(self) -> bool:
        """True if requests wait long for a worker."""
        return self._driver.is_crowded

    @property
    def facts(self) -> ModelFacts:
        """Limits for validation: those of the model, or of the workers if they are tighter."""
        limit = self._worker_limit()
        if limit is None or limit >= self.model.facts.max_model_len:
            return self.model.facts
        return replace(self.model.facts, max_model_len=limit)

    @property
    def adapters(self) -> Adapters:
        """The registered LoRA adapters by name; a new mapping after each change."""
        return self._adapters()

    def card_of(self, name: str) -> ModelCard:
        """Return the card of a model, with the limits that currently apply; an empty name stands for the served model.

        Raises:
            ModelNotFound: no model or adapter has this name.
        """
        facts = self.facts
        adapter = check_model(name, facts, self._adapters())
        card = replace(self.model.card, max_model_len=facts.max_model_len)
        return card if adapter is None else self._adapter_card(card, self._adapters()[name])

    def cards(self) -> list[ModelCard]:
        """Return the cards of the served model and of its adapters, ordered by name."""
        card, adapters = self.card_of(""), self._adapters()
        return [card, *(self._adapter_card(card, adapters[name]) for name in sorted(adapters))]

    @staticmethod
    def _adapter_card(card: ModelCard, registered: RegisteredAdapter) -> ModelCard:
        adapter = registered.adapter
        return replace(card, id=adapter.name, path=adapter.path, created=int(registered.since_s), parent=card.id)

    def name_of(self, model: str) -> str:
        """Return the name under which a request is answered and recorded: the served model's, or a known adapter's.

        Other names are not recorded, because clients may send any. `generate` refuses them.
        """
        return model if self._is_other(model) and model in self._adapters() else self.model.facts.id

    def _is_other(self, model: str) -> bool:
        """Return whether a client names another model than the served one."""
        return model not in ("", self.model.facts.id)

    async def generate(
        self,
        request: GenerateRequest,
        trace: Context | None = None,
        tenant: Tenant = DEFAULT_TENANT,
        ingress: Ingress = UNKNOWN_INGRESS,
    ) -> AsyncGenerator[GenerateChunk]:
        """Serve a request of `tenant`.

        Raises:
            InvalidRequest, Unsupported: the request is invalid; raised before placement. Also raised later, if the
                answer is shorter than `resume_from` claims.
            QuotaExceeded, Overloaded, NoWorker, WorkerFailed, TransferError, RouterStopping: it could not be served.
            Conflict: another call has taken over the request.
        """
        name = self.name_of(request.model)
        facts = self.facts.of(tenant, name)
        served = Served(name, self.model.release, self._slo_counts)
        with self._requests.recording(request, tenant, ingress, trace, served) as recording:
            timeline = recording.timeline
            adapter = check_model(request.model, facts, self._adapters()) if self._is_other(request.model) else None
            check_request_id(request.request_id)
            claim = timeline.claim = claim_of(request, tenant, self._config, timeline.arrived_s)
            key = RecordKey(tenant.id, request.request_id or f"req-{uuid.uuid4().hex}")
            timeline.request_id = key.request_id
            params = sampling_params(request.sampling, facts)
            check_resume(request, params)
            past = await self._calls.take_over(key) if request.resume_from else None
            slot: AbstractContextManager[object] = self._limiter.slot(key.request_id, params.num_answers, tenant)
            if self._holding.is_needed:
                slot, claim = await self._held(recording, claim, params.num_answers, request.prompt)
                facts = self.facts.of(tenant, name)  # the workers' limits are known now
            images = self._image_memory.holding(request.prompt, tenant.id)
            with slot, self._calls.entered(key) as call, images as encoded:
                if not claim.was_held:
                    recording.charge = self._accounts.arrive(tenant, params.num_answers, name)
                prompt = await self._prompt(request, encoded, params, tenant)
                params, plan = await self._planned(request, prompt.token_ids, params, facts, tenant)
                await recording.charge.book(len(prompt.token_ids), self._num_to_reserve(request, params))
                spec = self._sequence(key.request_id, prompt, params, tenant, adapter)
                digest = digest_of(self.model.content_id, spec)
                noted = await self._begun(key, digest, params, request.resume_from, past)
                group = ChoiceGroup.begin(spec, claim, recording.trace, params.num_answers, noted, images=prompt.images)
                call.begin(digest, group)
                recording.admitted(group.timelines, params, len(prompt.token_ids), request.resume_from, digest)
                selection = AnswerSelection(params, request.resume_from) if params.is_selected else None
                writers = self._writers(request, group, params, plan)
                with self._journal.noting(key, digest, group.choices):
                    async with contextlib.aclosing(_replayed(writers)) as chunks:
                        async for chunk in chunks:
                            for ready in _ready(recording.drawn(chunk), selection):
                                yield call.giving(recording.sent(ready))
                                call.goes_on()
                    async with contextlib.aclosing(self._driver.run(group.unanswered())) as messages:
                        async for choice, message in messages:
                            for chunk in await self._written(choice, message, writers[choice]):
                                for ready in _ready(recording.drawn(chunk), selection):
                                    yield call.giving(recording.sent(ready))
                                    call.goes_on()
            self._limiter.record(time.monotonic() - timeline.arrived_s)

    async def _held(
        self, recording: Recording, claim: Claim, num_answers: int, prompt: PromptInput
    ) -> tuple[AbstractContextManager[object], Claim]:
        """Charge a request, hold it until its model is awake, and return its slots of the limiter and its new claim.

        Raises:
            QuotaExceeded: see `Accounts.arrive`.
            ModelWaking, NoWorker, RouterStopping, InvalidRequest: see `Holding.until_awake`.
        """
        timeline = recording.timeline
        recording.charge = self._accounts.arrive(claim.tenant, num_answers, timeline.model)
        released = await self._holding.until_awake(timeline.request_id, num_answers, claim, prompt_bytes(prompt))
        timeline.add(released.event)
        return released.slot, released.claim

    async def _written(self, choice: Choice, message: NewTokens, writer: SentAnswer) -> Sequence[GenerateChunk]:
        """Return the chunks for the client from a choice's new tokens."""
        chunks = await writer.write(message.token_ids, message.finish_reason, message.scores)
        if writer.has_ended:
            choice.is_answered = True
            self._driver.answered(choice, writer.num_tokens)
        if choice.prompt_scores is None or not chunks:
            return chunks
        return [_with_prompt_scores(chunks[0], choice), *chunks[1:]]

    async def tokenize(
        self, prompt: PromptInput, tenant: Tenant, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        """Return the prompt's token ids. The model's entry stays open meanwhile: a worker may have to look at images.

        Raises:
            InvalidRequest: see `PromptEncoder.encode`.
            Forbidden: see `check_special`.
            Unsupported, Overloaded, NoWorker, WorkerFailed: no worker can look at its images.
        """
        self._slo_counts.in_flight += 1
        try:
            with self._image_memory.holding(prompt, tenant.id) as encoded:
                return (await self._encoded(prompt, encoded, tenant, self.facts, truncation)).token_ids
        finally:
            self._slo_counts.in_flight -= 1

    async def _prompt(
        self, request: GenerateRequest, encoded: Sequence[bytes], params: SamplingParams, tenant: Tenant
    ) -> _Prompt:
        """Return a request's prompt, truncated as it asks for, and with the start of a decoder if the model has one.

        Args:
            encoded: its images.
        """
        facts, start_ids = self.facts, self.model.tokenizer.decoder_start_ids
        if not start_ids:
            truncation = truncation_of(request.truncation, params, facts)
            return await self._encoded(request.prompt, encoded, tenant, facts, truncation)
        facts = replace(facts, max_model_len=facts.max_model_len - len(start_ids))
        truncation = truncation_of(request.truncation, params, facts)
        prompt = await self._encoded(request.prompt, encoded, tenant, facts, truncation)
        return prompt._replace(token_ids=prompt.token_ids + start_ids)

    async def _encoded(
        self,
        prompt: PromptInput,
        encoded: Sequence[bytes],
        tenant: Tenant,
        facts: ModelFacts,
        truncation: Truncation | None,
    ) -> _Prompt:
        check_special(prompt, tenant)
        if not encoded:
            return _Prompt(await self._encoder.encode(prompt, tenant, facts, truncation))
        if truncation is not None:
            name = "truncate_prompt_tokens"
            raise InvalidRequest(f"{name} cannot be combined with images, which it might cut; unset it", name)
        placeholder = await self._looker.placeholder()
        written = await self._encoder.encode(prompt, tenant, facts)
        images = await self._looker.look(encoded, tenant, self._sequences.cache_seed(tenant))
        token_ids, placed = with_images(written, placeholder, images.seen)
        check_prompt(token_ids, facts)
        return _Prompt(token_ids, placed, images)

    def _sequence(
        self, request_id: str, prompt: _Prompt, params: SamplingParams, tenant: Tenant, adapter: Adapter | None
    ) -> SequenceSpec:
        """Return the sequence of a request's first choice."""
        spec = self._sequences.build(request_id, prompt.token_ids, params, tenant)
        return replace(spec, adapter=adapter, images=prompt.placed) if adapter is not None or prompt.placed else spec

    def _num_to_reserve(self, request: GenerateRequest, params: SamplingParams) -> int:
        """Return the number of tokens to reserve for a request's answers.

        This is the maximum length, or the expected length if the client does not set `max_tokens`.
        """
        assert params.max_tokens is not None
        num_tokens = params.max_tokens
        if "max_tokens" not in request.sampling and not params.ignore_eos:
            num_tokens = min(num_tokens, self._config.expected_output_default)
        return num_tokens * (params.num_beams if params.use_beam_search else params.num_answers)

    async def _planned(
        self,
        request: GenerateRequest,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        facts: ModelFacts,
        tenant: Tenant,
    ) -> tuple[SamplingParams, AnswerPlan | None]:
        """Return the parameters for the workers with lengths, tool choice and reasoning, and the plan of the answer.

        The plan assigns the parts of the answer to the fields of the response. The answer's structure is checked.
        """
        params = with_lengths(params, request.sampling, len(prompt_ids), facts, shortens=request.shortens_answer)
        check_resume(request, params)
        prompt, tokenizer, form = request.prompt, self.model.tokenizer, self.model.format
        plan = None
        if isinstance(prompt, Chat):
            plan = form.plan(prompt, prompt_ids, tokenizer, params)
            params = with_tool_choice(params, prompt, form.calls, tokenizer)
        params = in_tokens(params, tokenizer)
        if params.is_structured:
            params = with_reasoning(params, plan)
        structure = await self._structures.check(params.structured_outputs, tenant.id)
        if structure is not params.structured_outputs:
            params = replace(params, structured_outputs=structure)
        return params, plan

    async def _begun(
        self, key: RecordKey, digest: bytes, params: SamplingParams, delivered: Mapping[int, int], past: Call | None
    ) -> dict[int, Noted]:
        """Return the tokens that a resumed request already has, by choice.

        A request whose choices are sent together at the end starts over: the client has nothing of it yet, and the
        records have no scores.

        Args:
            delivered: number of tokens that the client has, by choice.
        """
        if not delivered or params.comes_at_once:
            return {}
        known = await self._noted(key, digest, past)
        has_scores = params.wants_scores or params.prompt_logprobs is not None
        return with_delivered(only_delivered(known, delivered) if has_scores else known, delivered)

    async def _noted(self, key: RecordKey, digest: bytes, past: Call | None) -> dict[int, Noted]:
        """Return the tokens recorded for this request, by choice, from this router's calls or from Redis."""
        if past is not None and past.digest == digest:
            return past.noted()
        return await self._journal.recall(key, digest)

    def _writers(
        self, request: GenerateRequest, group: ChoiceGroup, params: SamplingParams, plan: AnswerPlan | None
    ) -> dict[Choice, SentAnswer]:
        """Create the writers of a request's answers."""
        tokenizer, num_delivered = self.model.tokenizer, {} if params.is_selected else request.resume_from
        chunks = {
            choice: AnswerChunks(
                AnswerWriter(
                    tokenizer,
                    choice.spec.token_ids,
                    params,
                    num_delivered=num_delivered.get(choice.index, 0),
                    channels=plan.channels(choice.spec.request_id, choice.index) if plan else None,
                ),
                request,
                request_id=choice.spec.request_id,
                choice_index=choice.index,
            )
            for choice in group.choices
        }
        moderator, tenant = self._moderator, group.choices[0].claim.tenant.id
        if moderator is None:
            return {each: SentAnswer(chunks[each]) for each in chunks}
        return {each: ModeratedAnswer(chunks[each], moderator, tokenizer, tenant) for each in chunks}


def _ready(chunk: GenerateChunk, selection: AnswerSelection | None) -> Sequence[GenerateChunk]:
    """Return the chunks that the client gets now that there is a new one."""
    return (chunk,) if selection is None else selection.take(chunk)


async def _replayed(writers: Mapping[Choice, SentAnswer]) -> AsyncGenerator[GenerateChunk]:
    """Yield the chunks of the tokens that a resumed request already has."""
    for choice, writer in writers.items():
        if choice.emitted:
            async with contextlib.aclosing(writer.replay(choice.emitted, choice.finish_reason)) as replayed:
                async for chunks in replayed:
                    for chunk in chunks:
                        yield chunk
            choice.is_answered = writer.has_ended


def _with_prompt_scores(chunk: GenerateChunk, choice: Choice) -> GenerateChunk:
    """Move the pending scores of the prompt from a choice into its chunk, and return the chunk."""
    assert choice.prompt_scores is not None
    prompt_ids = choice.spec.token_ids[: choice.spec.num_prompt_tokens]
    scores, choice.prompt_scores = PromptScores(prompt_ids, choice.prompt_scores), None
    return replace(chunk, prompt_scores=scores)
