"""Instruments with which the router records the events of requests. A new one is one field of `RequestMetrics`.

Names are OpenTelemetry's. Prometheus shows them with underscores and units: `gen_ai.server.request.duration` is
`gen_ai_server_request_duration_seconds` there. Durations are differences of one process's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.telemetry.prometheus import Counter, Histogram

DIGITS = (1, 1.2, 1.4, 1.68, 2, 2.4, 2.8, 3.2, 3.8, 4.4, 5, 6, 7, 8.4)
"""Bucket bounds in each power of ten.

Each is at most 1.2 times the previous one, so that any two values of a bucket, and so the shown and the true quantile,
differ by at most 20 %.
"""
FIRST_BOUND = 0.001
"""Lowest bound: smaller values are not distinguished."""


def close_bounds(last: float) -> list[float]:
    """Return bounds from FIRST_BOUND to `last` that are close enough for quantiles within 20 % of the true value."""
    steps = [float(f"{digit}e{power}") for power in range(-3, 5) for digit in DIGITS]
    return [*(step for step in steps if step < last), last]


DURATION_BOUNDS = STAGE_BOUNDS = close_bounds(3600.0)
TTFT_BOUNDS = close_bounds(600.0)
TOKEN_BOUNDS = close_bounds(30.0)
ERROR_BOUNDS = close_bounds(10.0)
LENGTH_BOUNDS = [float(2**exponent) for exponent in range(4, 21)]
PROMPT_CLASSES = (256, 1024, 4096)
"""Upper bounds of the prompt classes, in uncached tokens; the last class has none.

The number of uncached tokens, not the length of the prompt, determines the time to first token. Up to 256: a question
or the next turn of a chat; up to 1,024: some pages; up to 4,096: a document; more: an agent's first turn.
"""
TO_COMPUTE = "to_compute"
"""Label of a prompt's class."""


def prompt_class(num_to_compute: int) -> str:
    """Return the class of a prompt with this many uncached tokens: the upper bound of the class, or +Inf."""
    return next((str(most) for most in PROMPT_CLASSES if num_to_compute <= most), "+Inf")


def _histogram(name: str, description: str, bounds: Sequence[float], unit: str = "s") -> Histogram:
    made: Histogram = field(default_factory=lambda: Histogram(name, description, bounds, unit))
    return made


def _counter(name: str, description: str, unit: str = "") -> Counter:
    made: Counter = field(default_factory=lambda: Counter(name, description, unit))
    return made


@dataclass(kw_only=True, eq=False)
class RequestMetrics:
    """One field per instrument, in the order of the catalogue; its description is the one that Prometheus shows."""

    request_duration: Histogram = _histogram(
        "gen_ai.server.request.duration", "Time from a request's arrival to its last token.", DURATION_BOUNDS
    )
    time_to_first_token: Histogram = _histogram(
        "gen_ai.server.time_to_first_token",
        "Time from a request's arrival to its first token. Label to_compute: upper bound of the number of uncached "
        "prompt tokens.",
        TTFT_BOUNDS,
    )
    time_per_output_token: Histogram = _histogram(
        "gen_ai.server.time_per_output_token", "Mean time between a request's tokens after the first.", TOKEN_BOUNDS
    )
    inter_token_latency: Histogram = _histogram(
        "baton.inter_token_latency", "Time between two consecutive tokens of a choice.", TOKEN_BOUNDS
    )
    stage_duration: Histogram = _histogram(
        "baton.stage.duration",
        "Time that an answered request spent in a stage: queue, decode_admission, prefill, transfer, decode or "
        "recovery. Every request is in every histogram; its stages add up to the time from arrival to last token.",
        STAGE_BOUNDS,
    )
    transfer_duration: Histogram = _histogram(
        "baton.transfer.duration",
        "Duration of a KV transfer, from its first chunk to the acknowledged commit.",
        DURATION_BOUNDS,
    )
    transfer_bytes: Counter = _counter("baton.transfer", "KV bytes transferred.", "By")
    prediction_error: Histogram = _histogram(
        "baton.placement.prediction_error",
        "Relative error of placement's predictions, |predicted - measured| / measured, by predicted quantity.",
        ERROR_BOUNDS,
        unit="",
    )
    shed: Counter = _counter(
        "baton.admission_shed", "Admitted requests that were shed before their first token in favour of others."
    )
    requests_slo: Counter = _counter(
        "baton.requests_slo",
        "Finished requests by SLO class and outcome: met, ttft_missed, itl_missed, e2e_missed, error, rejected or "
        "cancelled. Goodput is the rate of met.",
    )
    tokens_slo_met: Counter = _counter(
        "baton.tokens_slo_met", "Tokens generated for requests that met their objectives, by SLO class."
    )
    slo_misses: Counter = _counter(
        "baton.slo_misses",
        "Answered requests that missed an objective, by SLO class, outcome (ttft_missed, itl_missed, e2e_missed) "
        "and responsible stage: queue, decode_admission, prefill, transfer, decode or recovery.",
    )
    ignored_fields: Counter = _counter(
        "baton.ignored_fields",
        "Fields of requests over HTTP that were accepted without an effect, by name; other: no API has such a field.",
    )
    refused_fields: Counter = _counter(
        "baton.refused_fields",
        "Requests over HTTP that were rejected for a field of their body, by the field's name; other: no API has it.",
    )
    tenant_requests: Counter = _counter(
        "baton.tenant_requests",
        "Finished requests by tenant and outcome: the outcomes of baton_requests_slo_total, invalid, and limited: "
        "beyond a limit of the tenant.",
    )
    tenant_tokens: Counter = _counter(
        "baton.tenant_tokens",
        "Tokens of requests, by tenant and kind: prompt, cached (a part of prompt), generated (sent to the "
        "client), reasoning (a part of generated), and computed: all tokens that workers generated, which is what "
        "the token limits count.",
    )
    tenant_refusals: Counter = _counter(
        "baton.tenant_refusals",
        "Requests rejected because of a limit of their tenant, by tenant and limit: requests_per_minute, "
        "tokens_per_minute, tokens_per_day or max_in_flight.",
    )
    tenants_file_reads: Counter = _counter(
        "baton.tenants_file_reads",
        "Versions of the tenants' file that were read after the start, by outcome: adopted, or refused; then the "
        "previous entries stay in force.",
    )
    usage_records: Counter = _counter(
        "baton.usage_records", "Usage records by outcome: written, or failed because the file could not be written."
    )
    requests: Counter = _counter(
        "baton.requests",
        "Finished requests by outcome: ok, error, rejected, limited (beyond a limit of the tenant), invalid or "
        "cancelled.",
    )
    retries: Counter = _counter("baton.retries", "Choices that were placed again, by kind of the last failure.")
    migrations: Counter = _counter(
        "baton.migrations", "Choices that were migrated, with their KV, from a worker that leaves."
    )
    prompt_tokens: Counter = _counter("baton.prompt_tokens", "Prompt tokens of served requests.")
    prefix_hit_tokens: Counter = _counter(
        "baton.prefix_hit_tokens", "Prompt tokens found in a worker's prefix cache, or pulled into it."
    )
    prefix_ceiling_tokens: Counter = _counter(
        "baton.prefix_ceiling_tokens",
        "Prompt tokens that a cache without eviction would have held, among the prompts that this router has seen: at "
        "least the last 262144 blocks. The ceiling of baton_prefix_hit_tokens_total.",
    )
    stale_hints: Counter = _counter(
        "baton.index_stale_hints",
        "Placements on a worker that had cached less of the prompt than the prefix index reported.",
    )
    stale_tokens: Counter = _counter(
        "baton.index_stale_tokens",
        "Prompt tokens that the index wrongly reported as cached, even if they were then pulled from another worker.",
    )
    generation_tokens: Counter = _counter("baton.generation_tokens", "Generated tokens.")
    prompt_length: Histogram = _histogram(
        "baton.request_prompt_tokens", "Tokens of a served request's prompt, cached ones included.", LENGTH_BOUNDS, ""
    )
    answer_length: Histogram = _histogram(
        "baton.request_generation_tokens",
        "Tokens generated for a served request, of all its choices.",
        LENGTH_BOUNDS,
        "",
    )
    finished_choices: Counter = _counter(
        "baton.finished_choices",
        "Finished choices by finish reason: stop, length, tool_calls or content_filter.",
    )
    placements: Counter = _counter("baton.placements", "Placements by mode and workers.")
    moderation_verdicts: Counter = _counter(
        "baton.moderation_verdicts", "Verdicts of the operator's moderation: allowed, vetoed or failed."
    )
