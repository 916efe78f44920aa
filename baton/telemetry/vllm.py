"""Baton's metrics under the names that dashboards, autoscalers and gateways for vLLM expect.

They are shown if `telemetry.vllm_aliases` is set. Metrics of a worker, from its lease, have the labels `model_name` and
`engine` (the worker's id); those of the router have only `model_name`. The values are those of Baton's own instruments.
vLLM's metrics without an equivalent here are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from baton.cluster import Worker
from baton.telemetry.observed import StatusNow, labelled
from baton.telemetry.prometheus import Instrument, Observation, Observed, Renamed
from baton.telemetry.request_metrics import RequestMetrics

WorkerValue = Callable[[Worker], float]
# Name, definition, value, and whether it is a counter.
PER_WORKER: tuple[tuple[str, str, WorkerValue, bool], ...] = (
    ("num_requests_running", "Sequences in a worker's batch.", lambda w: w.load.running, False),
    ("num_requests_waiting", "Sequences that wait on a worker.", lambda w: w.load.waiting, False),
    (
        "kv_cache_usage_perc",
        "Share of a worker's KV blocks that sequences hold: 1 is all of them.",
        lambda w: w.load.blocks.in_use / max(1, w.load.blocks.total),
        False,
    ),
    (
        "num_preemptions",
        "Sequences that were preempted and whose blocks were freed.",
        lambda w: w.load.preemptions,
        True,
    ),
    (
        "spec_decode_num_draft_tokens",
        "Speculative tokens that were verified.",
        lambda w: w.load.drafted_tokens,
        True,
    ),
    (
        "spec_decode_num_accepted_tokens",
        "Speculative tokens that were accepted.",
        lambda w: w.load.accepted_tokens,
        True,
    ),
)


def aliases(metrics: RequestMetrics, status: StatusNow) -> list[Instrument]:
    """Return the instruments under vLLM's names.

    Args:
        status: returns the cluster; called at every scrape.
    """

    def per_worker(value: WorkerValue) -> Iterable[Observation]:
        return [Observation(value(w), _of_worker(labels)) for w, labels in labelled(status())]

    def cache_config() -> Iterable[Observation]:
        for worker, labels in labelled(status()):
            sizes = {"block_size": worker.info.block_size, "num_gpu_blocks": worker.load.blocks.total}
            shown = {name: str(size) for name, size in sizes.items()}
            yield Observation(1, {**_of_worker(labels), **shown})

    def with_reason(labels: Mapping[str, str]) -> Mapping[str, str]:
        return {**_named(labels), "finished_reason": labels["reason"]}

    def answered(labels: Mapping[str, str]) -> Mapping[str, str] | None:
        return None if labels.get("error.type") else _named(labels)

    def of_stage(stage: str, labels: Mapping[str, str]) -> Mapping[str, str] | None:
        return _named(labels) if labels["stage"] == stage else None

    shown: list[Instrument] = [
        Observed(f"vllm:{name}", text, partial(per_worker, value), is_counter=is_counter)
        for name, text, value, is_counter in PER_WORKER
    ]
    shown.append(
        Observed("vllm:cache_config_info", "1 for each worker, with the sizes of its KV pool as labels.", cache_config)
    )
    shown += [
        Renamed(source, f"vllm:{name}", text, relabel)
        for name, text, source, relabel in (
            ("prefix_cache_queries", "Prompt tokens looked for in prefix caches.", metrics.prompt_tokens, _named),
            ("prefix_cache_hits", "Prompt tokens found in prefix caches.", metrics.prefix_hit_tokens, _named),
            ("prompt_tokens", "Prompt tokens of served requests.", metrics.prompt_tokens, _named),
            ("generation_tokens", "Generated tokens.", metrics.generation_tokens, _named),
            ("request_success", "Finished choices by finish reason.", metrics.finished_choices, with_reason),
        )
    ]
    shown += [
        Renamed(source, f"vllm:{name}_seconds", text, relabel)
        for name, text, source, relabel in (
            ("time_to_first_token", "Time from arrival to the first token.", metrics.time_to_first_token, _named),
            ("inter_token_latency", "Time between two tokens of a choice.", metrics.inter_token_latency, _named),
            ("e2e_request_latency", "Time from arrival to the last token.", metrics.request_duration, answered),
            ("request_queue_time", "Time waiting for the prefill.", metrics.stage_duration, partial(of_stage, "queue")),
            ("request_prefill_time", "Time in the prefill.", metrics.stage_duration, partial(of_stage, "prefill")),
            ("request_decode_time", "Time decoding.", metrics.stage_duration, partial(of_stage, "decode")),
        )
    ]
    return shown


def _named(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return the label of the model of a row of a request metric."""
    return {"model_name": labels.get("model") or labels.get("gen_ai.request.model", "")}


def _of_worker(labels: Mapping[str, str]) -> Mapping[str, str]:
    return {"model_name": labels["model"], "engine": labels["worker"]}
