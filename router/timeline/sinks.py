"""What is derived from the timeline of an ended request: its metrics, its span and its usage record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode

from baton.api import GenerateRequest
from baton.sampling import FinishReason, SamplingParams
from baton.telemetry import tracing
from baton.telemetry.request_metrics import TO_COMPUTE, RequestMetrics, prompt_class
from router.admission import SloCounts
from router.timeline import folds
from router.timeline.events import ChoiceTimeline, Ended, Finished, Timeline
from router.timeline.folds import SloOutcome, StagePhase, Stages
from router.timeline.usage_record import UsageCall, UsageRecord


def usage_record(timeline: Timeline, call: UsageCall) -> UsageRecord:
    """Return the line of the usage log."""
    status = _ended(timeline).status
    return UsageRecord(
        time_s=timeline.ns(timeline.ended_s) / 1e9,
        request_id=timeline.request_id,
        tenant=timeline.tenant,
        model=timeline.model,
        usage=folds.usage(timeline),
        finish_reasons=tuple(reason.value for reason in _finish_reasons(timeline)),
        status=status if status in ("ok", "cancelled") else "error",
        is_resumption=call.is_resumption,
    )


def record_metrics(timeline: Timeline, stages: Stages, instruments: RequestMetrics, slo_counts: SloCounts) -> None:
    """Count a request in all metrics that have one entry for each request."""
    ended, model, tenant = _ended(timeline), _model(timeline), {"tenant": timeline.tenant}
    instruments.tenant_tokens.add(timeline.num_computed, {**tenant, "kind": "computed"})
    instruments.requests.add(1, {**model, "outcome": ended.status})
    instruments.tenant_requests.add(1, {**tenant, "outcome": ended.outcome})
    labels = _labels(timeline, ended)
    instruments.request_duration.record(timeline.ended_s - timeline.arrived_s, labels)
    _record_slo(timeline, ended, stages, instruments, slo_counts)
    if timeline.first_token_s:
        _record_served(timeline, labels, instruments)


def _model(timeline: Timeline) -> dict[str, str]:
    return {"model": timeline.model, "release": timeline.release}


def _labels(timeline: Timeline, ended: Ended | None) -> dict[str, str]:
    """Return the labels of OpenTelemetry's conventions for generative AI."""
    labels = {
        "gen_ai.operation.name": timeline.operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": timeline.model,
        "release": timeline.release,
    }
    return {**labels, "error.type": ended.error_type} if ended is not None and ended.error_type else labels


def _record_slo(
    timeline: Timeline, ended: Ended, stages: Stages, instruments: RequestMetrics, slo_counts: SloCounts
) -> None:
    if timeline.claim is None or ended.status in ("invalid", "limited"):
        return
    model = _model(timeline)
    outcome, labels = ended.outcome, {**model, "slo_class": timeline.claim.slo_class}
    if ended.status == "ok":
        for stage, seconds in stages.by_stage().items():
            instruments.stage_duration.record(seconds, {**model, "stage": stage.value})
        if outcome == SloOutcome.MET:
            instruments.tokens_slo_met.add(timeline.num_sent, labels)
        else:
            instruments.slo_misses.add(1, {**labels, "outcome": outcome, "stage": ended.blamed_stage})
    slo_counts.met += outcome == SloOutcome.MET
    slo_counts.missed += outcome == "error" or bool(ended.blamed_stage)
    slo_counts.rejected += outcome == "rejected"
    instruments.requests_slo.add(1, {**labels, "outcome": outcome})


def _record_served(timeline: Timeline, labels: dict[str, str], instruments: RequestMetrics) -> None:
    usage, first, model = folds.usage(timeline), timeline.choices[0], _model(timeline)
    by_class = labels | {TO_COMPUTE: prompt_class(usage.prompt_tokens - usage.cached_tokens)}
    instruments.time_to_first_token.record(timeline.first_token_s - timeline.arrived_s, by_class)
    if (itl_s := folds.itl_s(timeline)) is not None:
        instruments.time_per_output_token.record(itl_s, labels)
    instruments.prompt_tokens.add(usage.prompt_tokens, model)
    instruments.prompt_length.record(usage.prompt_tokens, model)
    instruments.answer_length.record(timeline.num_sent, model)
    instruments.prefix_hit_tokens.add(usage.cached_tokens, model)
    # At least the actual hit: another router may have seen the prefix.
    instruments.prefix_ceiling_tokens.add(max(first.num_seen_tokens, usage.cached_tokens), model)
    instruments.generation_tokens.add(timeline.num_sent, model)
    kinds = {
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "generated": timeline.num_sent,
        "reasoning": folds.num_reasoning_sent(timeline),
    }
    for what, num_tokens in kinds.items():
        instruments.tenant_tokens.add(num_tokens, {"tenant": timeline.tenant, "kind": what})
    for reason in _finish_reasons(timeline):
        instruments.finished_choices.add(1, {**model, "reason": reason.value})


def start_span(timeline: Timeline, request: GenerateRequest, trace: Context | None) -> Span:
    """Start the span of a request that has arrived.

    Args:
        trace: trace context of the client.
    """
    name = f"{timeline.operation} {timeline.model}"
    span = tracing.start_span(name, trace, _labels(timeline, None), timeline.arrived_ns, SpanKind.SERVER)
    if span.is_recording():
        span.set_attribute("gen_ai.request.stream", timeline.is_streamed)
        if (seed := request.sampling.get("seed")) is not None:
            span.set_attribute("gen_ai.request.seed", seed)
    return span


def write_parameters(span: Span, timeline: Timeline, params: SamplingParams) -> None:
    """Write the parameters of an admitted request to its span."""
    span.set_attributes(
        {
            "gen_ai.response.id": timeline.request_id,
            "gen_ai.response.model": timeline.model,
            "gen_ai.request.max_tokens": params.max_tokens or 0,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": float(params.top_k),
            "gen_ai.request.choice.count": params.n,
            "baton.request.num_stop_sequences": len(params.stop),
        }
    )


def end_span(
    span: Span, trace: Context, timeline: Timeline, life: Sequence[StagePhase], error: BaseException | None
) -> None:
    """End the span of a request, with one child span for each phase of `life`."""
    if span.is_recording():
        ended = _ended(timeline)
        if isinstance(error, Exception):
            span.set_status(StatusCode.ERROR, str(error))
        for stage, begin_s, end_s in life:
            tracing.span_between(f"request.{stage}", trace, timeline.ns(begin_s), timeline.ns(end_s))
        attributes: dict[str, str | int | float] = {"baton.outcome": ended.status, "baton.slo": ended.outcome}
        if ended.blamed_stage:
            attributes["baton.slo.blame"] = ended.blamed_stage
        if ended.error_type:
            attributes["error.type"] = ended.error_type
        if timeline.first_token_s:
            reasons = [reason.value for reason in _finish_reasons(timeline)]
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
            attributes |= _served_attributes(timeline, timeline.choices[0])
        span.set_attributes(attributes)
    span.end(timeline.ns(timeline.ended_s))


def _served_attributes(timeline: Timeline, first: ChoiceTimeline) -> dict[str, str | int | float]:
    usage = folds.usage(timeline)
    attributes: dict[str, str | int | float] = {
        "gen_ai.response.time_to_first_chunk": timeline.first_token_s - timeline.arrived_s,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "baton.mode": first.mode,
        "baton.prefill_worker": first.prefill_worker,
        "baton.decode_worker": first.decode_worker,
        "baton.prefix_source": first.source,
        "baton.retries": first.retries,
    }
    if (measured := folds.measured_placement(first)) is not None:
        prediction = measured.placed.prediction
        seconds = {**asdict(folds.predicted_seconds(prediction)), "ttft_s": prediction.ttft_s}
        attributes |= {f"baton.predicted.{name}": value for name, value in seconds.items()}
    return attributes


def _ended(timeline: Timeline) -> Ended:
    ended = timeline.ended
    assert ended is not None
    return ended


def _finish_reasons(timeline: Timeline) -> list[FinishReason]:
    """Return the finish reasons of the completed choices, in their order."""
    last = [choice.events[-1] for choice in timeline.choices if choice.events]
    return [event.reason for event in last if isinstance(event, Finished)]
