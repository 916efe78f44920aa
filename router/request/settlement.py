"""Records usage, timing, metrics, spans and SLO outcome of a request exactly once, however it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode

from baton.api import Chat, GenerateChunk, GenerateRequest, Timing, Usage
from baton.errors import InvalidRequest, Overloaded, QuotaExceeded, Unsupported
from baton.sampling import FinishReason, SamplingParams
from baton.telemetry import logs, tracing
from baton.telemetry.instruments import Instruments
from baton.telemetry.request_metrics import TO_COMPUTE, prompt_class
from baton.timelines import RUNNING
from kvstore.leases import RecordKey
from router.admission import Charge, Claim, SloCounts
from router.admission.tenants import Tenant
from router.request.answer_tokens import NO_TOKENS, AnswerTokens
from router.request.model import Ingress
from router.request.record import MOST_CHOICES, ChoiceRecord, FirstChoice, RequestRecord
from router.request.usage_log import UsageBook
from router.request.usage_record import UsageCall, UsageRecord
from router.serve.choice import Choice, ChoiceGroup
from router.serve.decisions import prediction_attributes
from router.serve.events import EventKind, EventLog, error_text
from router.slo import SloOutcome, Stage, StagePhase, Stages, blame, classify, phases

STAGE_LABELS = {stage: {"stage": stage.value} for stage in Stage}


class Settlement:
    """Context manager: collects time stamps while a request runs, and records metrics and trace when it ends.

    The request's arrival is the time at which this is created.

    Args:
        trace: trace context of the client.
        slo_counts: counters to update.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tenant: Tenant,
        ingress: Ingress,
        *,
        model_id: str,
        trace: Context | None,
        instruments: Instruments,
        slo_counts: SloCounts,
        usage_book: UsageBook,
    ) -> None:
        self.arrived_s = time.monotonic()
        self._arrived_ns = time.time_ns()
        self.request_id = request.request_id
        """Id of the request; empty: it has none yet."""
        self.claim: Claim | None = None
        """Claim of the request; None: it is not validated yet."""
        self.charge = Charge()
        """Charge to the tenant."""
        self._instruments = instruments
        self._slo_counts = slo_counts
        self._usage_book = usage_book
        self._usage_call: UsageCall | None = None
        """This call in the usage log; None: no token was sent yet, or there is no log."""
        self._tenant = tenant
        self._is_streamed = ingress.is_streamed
        self._continuous_usage = request.continuous_usage
        operation = "chat" if isinstance(request.prompt, Chat) else "text_completion"
        self._model = {"model": model_id}
        self._labels = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "baton",
            "gen_ai.request.model": model_id,
        }
        self._span = self._started_span(request, ingress, trace)
        self.trace = tracing.context_of(self._span)
        logs.about(self._span.get_span_context())
        self._choices: Sequence[Choice] = ()
        """The choices that the client gets."""
        self._num_prompt_tokens = 0
        self._tokens = NO_TOKENS
        self._digest = b""
        self._finish_reasons: dict[int, FinishReason] = {}
        self._first_token_s = 0.0
        self._ended_s = 0.0
        """Time at which the last chunk was sent or the request failed; 0: not yet."""
        self._life: list[StagePhase] = []
        """Phases of the request after its end; they are those of its first choice."""
        self._stages = Stages()
        self._num_unfinished = 0
        self._events = EventLog()
        self._events.note(self.arrived_s, EventKind.ARRIVED, "arrived")
        self._outcome_shown, self._error, self._blamed_stage = RUNNING, "", ""

    def _started_span(self, request: GenerateRequest, ingress: Ingress, trace: Context | None) -> Span:
        name = f"{self._labels['gen_ai.operation.name']} {self._model['model']}"
        span = tracing.start_span(name, trace, self._labels, self._arrived_ns, SpanKind.SERVER)
        if span.is_recording():
            span.set_attribute("gen_ai.request.stream", ingress.is_streamed)
            if ingress.address:
                span.set_attributes({"server.address": ingress.address, "server.port": ingress.port})
            if (seed := request.sampling.get("seed")) is not None:
                span.set_attribute("gen_ai.request.seed", seed)
        return span

    def begin(
        self,
        group: ChoiceGroup,
        params: SamplingParams,
        resume_from: Mapping[int, int],
        digest: bytes,
    ) -> None:
        """Record the request's choices when they are known.

        Args:
            group: all choices that are drawn.
            params: the parameters of the request.
            resume_from: number of tokens that the client already has, by choice.
            digest: digest of everything that determines the answer.
        """
        choices = group.choices[: params.n]
        spec = choices[0].spec
        self._choices, self._digest = choices, digest
        self._tokens = AnswerTokens(group, params, resume_from)
        self._num_prompt_tokens = spec.num_prompt_tokens
        self._num_unfinished = len(choices)
        self._events.note(time.monotonic(), EventKind.ADMITTED, f"admitted: {spec.num_prompt_tokens} prompt tokens")
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    "gen_ai.response.id": spec.request_id,
                    "gen_ai.response.model": self._model["model"],
                    "gen_ai.request.max_tokens": params.max_tokens or 0,
                    "gen_ai.request.temperature": params.temperature,
                    "gen_ai.request.top_p": params.top_p,
                    "gen_ai.request.top_k": float(params.top_k),
                    "gen_ai.request.choice.count": params.n,
                    "baton.request.num_stop_sequences": len(params.stop),
                }
            )

    def drawn(self, chunk: GenerateChunk) -> GenerateChunk:
        """Count a chunk of a choice, even if the client does not get it, and return it."""
        return self._tokens.drawn(chunk)

    def book(self, chunk: GenerateChunk) -> GenerateChunk:
        """Count a chunk that is sent to the client, and return it; the last one gets usage and timing."""
        now = time.monotonic()
        if not self._first_token_s:
            self._first_token_s = now
            self._events.note(now, EventKind.FIRST_TOKEN, "the first token leaves for the client")
            if self._usage_book.is_kept:
                self._usage_call = self._usage_book.placed(self._key, self._digest, bool(self._tokens.delivered))
            if self.charge.quota is not None:
                chunk = replace(chunk, quota=self.charge.quota)
        index, num_tokens = chunk.choice_index, len(chunk.token_ids)
        if num_tokens:
            stages = self._choices[index].stages
            if self._tokens.sent[index]:
                gap_s = (now - stages.last_token_s) / num_tokens
                self._instruments.inter_token_latency.record(gap_s, times=num_tokens)
            stages.last_token_s = now
        self._tokens.left(chunk)
        if chunk.finish_reason is not None:
            self._finish_reasons[index] = chunk.finish_reason
            text = f"finished after {self._tokens.sent[index]} tokens: {chunk.finish_reason.value}"
            self._choices[index].events.note(now, EventKind.FINISHED, text)
            self._num_unfinished -= 1
        if self._num_unfinished:
            return replace(chunk, usage=self.usage()) if self._continuous_usage else chunk
        self._end(now)
        self.charge.settle(self._tokens.num_computed)  # before the client gets the last chunk and sends a new request
        return replace(chunk, usage=self.usage(), timing=self.timing())

    def usage(self) -> Usage:
        """Return the usage of the whole answer; see `AnswerTokens.usage`."""
        return self._tokens.usage(self._num_prompt_tokens, self._choices[0].num_cached_tokens or 0)

    @property
    def _key(self) -> RecordKey:
        return RecordKey(self._tenant.id, self._choices[0].spec.request_id)

    @property
    def _after_first_s(self) -> float:
        """Seconds from the first to the last token; 0 if no token was sent, because the client had all of them."""
        return max(0.0, self._choices[0].stages.last_token_s - self._first_token_s)

    def _itl_s(self) -> float:
        """Return the mean seconds between two tokens; 0 for fewer than two tokens."""
        num_gaps = self._tokens.sent[0] - 1
        return self._after_first_s / num_gaps if num_gaps > 0 else 0.0

    def _end(self, now_s: float) -> None:
        self._ended_s = now_s
        self._life = self._life_until(now_s)
        self._stages = Stages.of(self._life, self._first_token_s)

    def _life_until(self, now_s: float) -> list[StagePhase]:
        noted = self._choices[0].stages.until(now_s) if self._choices else []
        return phases(self.arrived_s, self._first_token_s, now_s, noted)

    def timing(self) -> Timing:
        first, stages = self._choices[0], self._stages
        return Timing(
            ttft_s=self._first_token_s - self.arrived_s,
            total_s=stages.total_s,
            queue_s=stages.queue_s,
            admission_s=stages.decode_admission_s,
            prefill_s=stages.prefill_s,
            transfer_s=stages.transfer_s,
            decode_s=stages.decode_s,
            recovery_s=stages.recovery_s,
            prefill_worker=first.prefill_worker,
            decode_worker=first.decode_worker,
            mode=first.mode,
            retries=first.machine.retries,
        )

    def record(self) -> RequestRecord:
        """Return the record of the request in its current or final state."""
        ended_s, choices = self._ended_s or time.monotonic(), self._choices
        has_gaps = bool(choices) and self._tokens.sent[0] > 1
        itl_s = self._itl_s() if has_gaps else None
        if choices and choices[0].decision is not None:
            choices[0].decision.measured.step_s = itl_s
        return RequestRecord(
            request_id=self.request_id,
            tenant=self._tenant.id,
            operation=self._labels["gen_ai.operation.name"],
            is_streamed=self._is_streamed,
            claim=self.claim,
            arrived_s=self.arrived_s,
            arrived_at_s=self._arrived_ns / 1e9,
            ended_s=ended_s,
            outcome=self._outcome_shown,
            error=self._error,
            blamed_stage=self._blamed_stage,
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=self._tokens.num_sent,
            num_choices=len(choices),
            first_token_s=self._first_token_s,
            itl_s=itl_s,
            life=self._life or self._life_until(ended_s),
            first=FirstChoice.of(choices),
            events=self._events,
            choices=tuple(ChoiceRecord.of(choice) for choice in choices[:MOST_CHOICES]),
        )

    def __enter__(self) -> Settlement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Settle the request. GeneratorExit and CancelledError mean that the client has disconnected."""
        outcome = self._outcome(error)
        if not self._ended_s:
            self._end(time.monotonic())
        self.charge.settle(self._tokens.num_computed)  # no effect if the last chunk has settled it
        self._instruments.tenant_tokens.add(self._tokens.num_computed, {"tenant": self._tenant.id, "kind": "computed"})
        if self._usage_call is not None:
            self._usage_book.ended(self._key, self._usage_call, self._usage_record(self._usage_call, outcome))
        self._instruments.requests.add(1, {**self._model, "outcome": outcome})
        if outcome == "cancelled":
            self._labels["error.type"] = outcome
        elif outcome != "ok":
            assert error is not None
            self._labels["error.type"], self._error = type(error).__name__, error_text(error)
            self._span.set_status(StatusCode.ERROR, str(error))
        slo = self._outcome_shown = str(self._book_slo(outcome))
        self._events.note(self._ended_s, EventKind.ENDED, f"{slo}: {self._error}" if self._error else slo)
        self._instruments.tenant_requests.add(1, {"tenant": self._tenant.id, "outcome": slo})
        self._instruments.request_duration.record(self._ended_s - self.arrived_s, self._labels)
        if self._first_token_s:
            self._book_served()
        if self._span.is_recording():
            self._write_span(outcome, slo)
        self._span.end(self._ns(self._ended_s))

    def _outcome(self, error: BaseException | None) -> str:
        if error is None or (self._choices and self._num_unfinished == 0):
            return "ok"
        match error:
            case QuotaExceeded():
                return "limited"
            case Overloaded():
                return "rejected"
            case InvalidRequest() | Unsupported():
                return "invalid"
            case Exception():
                return "error"
        return "cancelled"

    def _book_slo(self, outcome: str) -> str:
        """Count the request's SLO outcome, and return it."""
        if self.claim is None or outcome in ("invalid", "limited"):
            return outcome
        labels = {**self._model, "slo_class": self.claim.slo_class}
        if outcome == "ok":
            outcome = self._book_stages(self.claim, labels)
        self._slo_counts.met += outcome == SloOutcome.MET
        self._slo_counts.missed += outcome == "error"
        self._slo_counts.rejected += outcome == "rejected"
        self._instruments.requests_slo.add(1, {**labels, "outcome": outcome})
        return outcome

    def _book_stages(self, claim: Claim, labels: dict[str, str]) -> SloOutcome:
        """Record the stages of a completed request, and the stage to blame for a missed objective."""
        objective, stages = claim.objective, self._stages
        for stage, seconds in stages.by_stage().items():
            self._instruments.stage_duration.record(seconds, STAGE_LABELS[stage])
        outcome = classify(self._first_token_s - self.arrived_s, self._itl_s(), stages.total_s, objective)
        if outcome is SloOutcome.MET:
            self._instruments.tokens_slo_met.add(self._tokens.num_sent, labels)
            return outcome
        self._slo_counts.missed += 1
        if outcome is SloOutcome.ITL_MISSED:
            stages = Stages.of(self._life_until(self._choices[0].stages.last_token_s), self._first_token_s)
        stage = blame(outcome, stages, objective, self._tokens.sent[0] - 1)
        self._blamed_stage = stage.value
        self._instruments.slo_misses.add(1, {**labels, "outcome": outcome, "stage": stage})
        self._span.set_attribute("baton.slo.blame", stage)
        return outcome

    def _book_served(self) -> None:
        usage, first, instruments = self.usage(), self._choices[0], self._instruments
        by_class = self._labels | {TO_COMPUTE: prompt_class(usage.prompt_tokens - usage.cached_tokens)}
        instruments.time_to_first_token.record(self._first_token_s - self.arrived_s, by_class)
        if self._tokens.sent[0] > 1:
            instruments.time_per_output_token.record(self._itl_s(), self._labels)
        num_new = self._tokens.num_sent
        instruments.prompt_tokens.add(usage.prompt_tokens, self._model)
        instruments.prompt_length.record(usage.prompt_tokens, self._model)
        instruments.answer_length.record(num_new, self._model)
        instruments.prefix_hit_tokens.add(usage.cached_tokens, self._model)
        # At least the actual hit: another router may have seen the prefix.
        instruments.prefix_ceiling_tokens.add(max(first.num_seen_tokens, usage.cached_tokens), self._model)
        instruments.generation_tokens.add(num_new, self._model)
        kinds = {
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "generated": num_new,
            "reasoning": self._tokens.num_reasoning_sent,
        }
        for what, num_tokens in kinds.items():
            instruments.tenant_tokens.add(num_tokens, {"tenant": self._tenant.id, "kind": what})
        for reason in self._finish_reasons.values():
            instruments.finished_choices.add(1, {**self._model, "reason": reason.value})

    def _usage_record(self, call: UsageCall, outcome: str) -> UsageRecord:
        return UsageRecord(
            time_s=self._ns(self._ended_s) / 1e9,
            request_id=self._key.request_id,
            tenant=self._tenant.id,
            model=self._model["model"],
            usage=self.usage(),
            finish_reasons=tuple(reason.value for _, reason in sorted(self._finish_reasons.items())),
            status=outcome if outcome in ("ok", "cancelled") else "error",
            is_resumption=call.is_resumption,
        )

    def _ns(self, at_s: float) -> int:
        """Convert a time of the monotonic clock to the clock of traces, in nanoseconds."""
        return self._arrived_ns + round((at_s - self.arrived_s) * 1e9)

    def _write_span(self, outcome: str, slo: str) -> None:
        """Write the request's span with one child span per phase. The phases have no gaps."""
        for stage, begin_s, end_s in self._life:
            tracing.span_between(f"request.{stage}", self.trace, self._ns(begin_s), self._ns(end_s))
        attributes: dict[str, str | int | float] = {"baton.outcome": outcome, "baton.slo": slo}
        if error := self._labels.get("error.type"):
            attributes["error.type"] = error
        if self._first_token_s:
            usage, first = self.usage(), self._choices[0]
            reasons = [reason.value for _, reason in sorted(self._finish_reasons.items())]
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
            attributes |= {
                "gen_ai.response.time_to_first_chunk": self._first_token_s - self.arrived_s,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "baton.mode": first.mode,
                "baton.prefill_worker": first.prefill_worker,
                "baton.decode_worker": first.decode_worker,
                "baton.prefix_source": first.source,
                "baton.retries": first.machine.retries,
            }
            if first.decision is not None:
                attributes |= prediction_attributes(first.decision.prediction)
        self._span.set_attributes(attributes)
