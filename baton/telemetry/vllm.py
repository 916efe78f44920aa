"""What Baton measures, under the names that dashboards, autoscalers and gateways for vLLM expect.

Shown with `telemetry.vllm_aliases`. Per worker, as its lease tells it, with the labels `model_name` and `engine` (the
worker's id); what the router measures has `model_name` alone. Nothing is booked for it: values are those of Baton's
own instruments. Names of vLLM that nothing here stands for are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from baton.cluster import ClusterStatus, Worker
from baton.telemetry.prometheus import Counter, Histogram, Instrument, Observation, Observed, Renamed


class Served(NamedTuple):
    """The router's instruments that have a name in vLLM."""

    time_to_first_token: Histogram
    inter_token_latency: Histogram
    request_duration: Histogram
    stage_duration: Histogram
    prompt_tokens: Counter
    prefix_hit_tokens: Counter
    generation_tokens: Counter
    finished_choices: Counter


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
    ("num_preemptions", "Sequences that had to give their blocks back.", lambda w: w.load.preemptions, True),
)


def aliases(served: Served, status: Callable[[], ClusterStatus], model: str) -> list[Instrument]:
    """
    Args:
        status: called at every scrape.
    """
    named = {"model_name": model}

    def per_worker(value: WorkerValue) -> Iterable[Observation]:
        return [Observation(value(w), {**named, "engine": w.info.id}) for w in status().workers]

    def cache_config() -> Iterable[Observation]:
        for worker in status().workers:
            sizes = {"block_size": worker.info.block_size, "num_gpu_blocks": worker.load.blocks.total}
            shown = {name: str(size) for name, size in sizes.items()}
            yield Observation(1, {**named, "engine": worker.info.id, **shown})

    def all_rows(labels: Mapping[str, str]) -> Mapping[str, str]:
        return named

    def with_reason(labels: Mapping[str, str]) -> Mapping[str, str]:
        return {**named, "finished_reason": labels["reason"]}

    def answered(labels: Mapping[str, str]) -> Mapping[str, str] | None:
        return None if labels.get("error.type") else named

    def of_stage(stage: str, labels: Mapping[str, str]) -> Mapping[str, str] | None:
        return named if labels["stage"] == stage else None

    shown: list[Instrument] = [
        Observed(f"vllm:{name}", text, partial(per_worker, value), is_counter=is_counter)
        for name, text, value, is_counter in PER_WORKER
    ]
    shown.append(Observed("vllm:cache_config_info", "1 for a worker, with the sizes of its KV pool.", cache_config))
    shown += [
        Renamed(source, f"vllm:{name}", text, relabel)
        for name, text, source, relabel in (
            ("prefix_cache_queries", "Prompt tokens looked for in prefix caches.", served.prompt_tokens, all_rows),
            ("prefix_cache_hits", "Prompt tokens found in them.", served.prefix_hit_tokens, all_rows),
            ("prompt_tokens", "Prompt tokens of requests served.", served.prompt_tokens, all_rows),
            ("generation_tokens", "Tokens generated.", served.generation_tokens, all_rows),
            ("request_success", "Choices that came to their end, by reason.", served.finished_choices, with_reason),
        )
    ]
    shown += [
        Renamed(source, f"vllm:{name}_seconds", text, relabel)
        for name, text, source, relabel in (
            ("time_to_first_token", "From arrival to the first token.", served.time_to_first_token, all_rows),
            ("inter_token_latency", "Between two tokens of a choice.", served.inter_token_latency, all_rows),
            ("e2e_request_latency", "From arrival to the last token.", served.request_duration, answered),
            ("request_queue_time", "Waiting for the prefill.", served.stage_duration, partial(of_stage, "queue")),
            ("request_prefill_time", "Computing the prompt.", served.stage_duration, partial(of_stage, "prefill")),
            ("request_decode_time", "Decoding.", served.stage_duration, partial(of_stage, "decode")),
        )
    ]
    return shown
