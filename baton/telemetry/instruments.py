"""Every metric of Baton, with its definition and unit. Nothing else creates instruments.

Names in the code are OpenTelemetry's. Prometheus shows them with underscores and units:
`gen_ai.server.request.duration` is `gen_ai_server_request_duration_seconds` there. Durations are differences of one
process's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest

from baton.cluster import VERSION, ClusterStatus, PoolScaling, WorkerState
from baton.config import SloClassConfig
from baton.telemetry.prefixes import PrefixBook
from baton.telemetry.prometheus import Collector, Counter, Definition, Histogram, Instrument, Observation, Observed
from baton.telemetry.vllm import Served, aliases

# Bounds of the OpenTelemetry GenAI semantic conventions, in seconds, and beyond them what late answers take: a quantile
# in the last bucket is only known to be more than the last bound.
LONG_BOUNDS = [163.84, 327.68, 655.36, 1310.72, 3600.0]
DURATION_BOUNDS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, *LONG_BOUNDS]
LATE_BOUNDS = [20.0, 40.0, 60.0, 120.0, 300.0, 600.0]
TTFT_BOUNDS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, *LATE_BOUNDS]
TOKEN_BOUNDS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0]

STAGE_BOUNDS = [0.001, 0.0025, 0.005, *DURATION_BOUNDS]
ERROR_BOUNDS = [0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0]

TransferFields = dict[str, dict[str, str]]
"""Fields of `TransferCounts`, each with the labels that set it apart from the others of its instrument."""
DIRECTIONS, OUTCOMES = ("sent", "received"), ("committed", "failed")
FAILURES = ("corrupted", "expired", "timed_out", "refused", "lost")
# Name, unit, definition and fields. Of KV between workers, as their leases tell it: hand-overs and pulled prefixes.
# Every transfer is counted by both its sides; seconds by the sender.
TRANSFER_COUNTERS: tuple[tuple[str, str, str, TransferFields], ...] = (
    (
        "baton.kv_transfers",
        "",
        "A worker's KV transfers that ended, by direction and outcome. Those that nobody wanted any more are neither.",
        {f"{way}_{end}": {"direction": way, "outcome": end} for way in DIRECTIONS for end in OUTCOMES},
    ),
    (
        "baton.kv_transfer_failures",
        "",
        "The failed of them by reason. corrupted: a header or a checksum did not match; expired: the lease ended; "
        "timed_out: one operation took too long; refused: the two sides do not fit; lost: link, session or peer broke.",
        {name: {"reason": name} for name in FAILURES},
    ),
    (
        "baton.kv_messages_fenced",
        "",
        "Messages and chunks of an unknown or past transfer, which were dropped.",
        {"fenced": {}},
    ),
    ("baton.kv_messages_resent", "", "Messages said again because no answer came.", {"resent": {}}),
    (
        "baton.kv_nccl_stalls",
        "",
        "NCCL operations that did not end in time; their pair was given up.",
        {"nccl_stalls": {}},
    ),
    (
        "baton.kv_transfer",
        "By",
        "Payload of committed KV transfers.",
        {f"{way}_bytes": {"direction": way} for way in DIRECTIONS},
    ),
    (
        "baton.kv_transfer_chunks",
        "",
        "Chunks of committed KV transfers.",
        {f"{way}_chunks": {"direction": way} for way in DIRECTIONS},
    ),
    (
        "baton.kv_transfer_time",
        "s",
        "Sent KV transfers: first chunk to acknowledged commit, summed.",
        {"transfer_s": {}},
    ),
    (
        "baton.kv_transfer_exposed_time",
        "s",
        "The part of it after the prompt was computed: what no computing hid.",
        {"exposed_s": {}},
    ),
    ("baton.kv_pulled_tokens", "", "Prompt tokens pulled from another worker's cache.", {"pulled_tokens": {}}),
    ("baton.kv_pull_failures", "", "Prefixes that were to be pulled and had to be computed.", {"failed_pulls": {}}),
)
TRANSFER_GAUGES: tuple[tuple[str, str, str, TransferFields], ...] = (
    ("baton.kv_open_pairs", "", "Open pairs: sessions with other workers, a link each.", {"open_pairs": {}}),
    ("baton.kv_staging_slots_in_use", "", "Staging slots that hold a chunk.", {"slots_in_use": {}}),
    ("baton.kv_unsent", "By", "KV that is computed, pinned and not sent yet.", {"unsent_bytes": {}}),
)


class Instruments:
    """The router's instruments and their Prometheus exposition.

    Args:
        status: the cluster as gauges show it; called at every scrape.
        slo_classes: whose objectives are shown, by name.
        vllm_model: show what can be shown under vLLM's names, too, as this model's; empty: do not.
    """

    def __init__(
        self,
        status: Callable[[], ClusterStatus],
        slo_classes: Mapping[str, SloClassConfig] | None = None,
        vllm_model: str = "",
    ) -> None:
        self._registry = CollectorRegistry()
        self._status = status
        self.prefixes = PrefixBook()
        instruments: list[Instrument] = []

        def seconds(name: str, description: str, bounds: list[float]) -> Histogram:
            instruments.append(histogram := Histogram(name, description, bounds, "s"))
            return histogram

        def counter(name: str, description: str, unit: str = "") -> Counter:
            instruments.append(counter := Counter(name, description, unit))
            return counter

        self.request_duration = seconds(
            "gen_ai.server.request.duration", "From arrival of a request to its last token.", DURATION_BOUNDS
        )
        self.time_to_first_token = seconds(
            "gen_ai.server.time_to_first_token", "From arrival of a request to its first token.", TTFT_BOUNDS
        )
        self.time_per_output_token = seconds(
            "gen_ai.server.time_per_output_token", "Mean time between a request's tokens after the first.", TOKEN_BOUNDS
        )
        self.inter_token_latency = seconds(
            "baton.inter_token_latency", "Time between two consecutive tokens of a choice.", TOKEN_BOUNDS
        )
        self.stage_duration = seconds(
            "baton.stage.duration",
            "Time that an answered request spent in a stage: queue, decode_admission, prefill, transfer, decode or "
            "recovery. A request is in each histogram; its stages add up to the time from arrival to last token.",
            STAGE_BOUNDS,
        )
        self.transfer_duration = seconds(
            "baton.transfer.duration", "Handing the KV over: first chunk to acknowledged commit.", DURATION_BOUNDS
        )
        self.transfer_bytes = counter("baton.transfer", "KV bytes handed over.", "By")
        self.prediction_error = Histogram(
            "baton.placement.prediction_error",
            "Of placement's predictions, by what was predicted: |predicted - measured| / measured.",
            ERROR_BOUNDS,
        )
        instruments.append(self.prediction_error)
        self.shed = counter(
            "baton.admission_shed",
            "Requests let in that had to make way before their first token.",
        )
        self.requests_slo = counter(
            "baton.requests_slo",
            "Finished requests by SLO class and outcome: met, ttft_missed, itl_missed, e2e_missed, error, rejected or "
            "cancelled. Goodput is the rate of met.",
        )
        self.tokens_slo_met = counter(
            "baton.tokens_slo_met", "Tokens generated for requests that met their objectives, by SLO class."
        )
        self.slo_misses = counter(
            "baton.slo_misses",
            "Answered requests that missed an objective, by SLO class, outcome (ttft_missed, itl_missed, e2e_missed) "
            "and the stage to blame: queue, decode_admission, prefill, transfer, decode or recovery.",
        )
        self.tenant_requests = counter(
            "baton.tenant_requests",
            "Finished requests by tenant and outcome: those of baton_requests_slo_total, and invalid.",
        )
        self.tenant_tokens = counter(
            "baton.tenant_tokens", "Tokens of requests served, by tenant and kind: prompt, cached of them, generated."
        )
        self.requests = counter(
            "baton.requests", "Finished requests by outcome: ok, error, rejected, invalid or cancelled."
        )
        self.retries = counter("baton.retries", "Choices placed again, by the kind of failure before.")
        self.migrations = counter("baton.migrations", "Choices moved from a worker that leaves, with their KV.")
        self.prompt_tokens = counter("baton.prompt_tokens", "Prompt tokens of requests served.")
        self.prefix_hit_tokens = counter(
            "baton.prefix_hit_tokens", "Prompt tokens found in a worker's prefix cache, or pulled into it."
        )
        self.prefix_ceiling_tokens = counter(
            "baton.prefix_ceiling_tokens",
            "Prompt tokens that a cache which forgets nothing would have had, as far as this router has seen them: the "
            "last 262144 blocks at least. The ceiling of baton_prefix_hit_tokens_total.",
        )
        self.stale_hints = counter(
            "baton.index_stale_hints",
            "Placements whose worker held less of the prompt than the prefix index said.",
        )
        self.stale_tokens = counter(
            "baton.index_stale_tokens", "Prompt tokens that it said too much; pulled ones are no excuse."
        )
        self.generation_tokens = counter("baton.generation_tokens", "Tokens generated.")
        self.finished_choices = counter(
            "baton.finished_choices", "Choices that came to their end, by reason: stop or length."
        )
        self.placements = counter("baton.placements", "Placements by mode and workers.")

        build = {"version": VERSION}
        gauges: dict[str, tuple[str, Callable[[ClusterStatus], Iterable[Observation]]]] = {
            "baton.kv_blocks": ("KV blocks of a worker by state.", _block_counts),
            "baton.worker_sequences": ("Sequences on a worker by state.", _sequence_counts),
            "baton.worker_ready": ("1 for a worker that takes traffic.", _ready),
            "baton.worker_state": (
                "1 for the state that a worker is in, 0 for the others: starting, ready, draining or dead.",
                _worker_states,
            ),
            "baton.worker_info": ("1 for a worker, with what it says of itself once.", _worker_infos),
            "baton.build_info": ("1 for the version of this router.", lambda s: [Observation(1, build)]),
            "baton.hot_prefix_share": (
                "Share of the last 1024 prompts that begin with a block, of the 5 most common ones that more than one "
                "prompt begins with. prefix: the first 8 hexadecimal digits of the block's key.",
                lambda s: [Observation(share, {"prefix": prefix}) for prefix, share in self.prefixes.hottest()],
            ),
            "baton.autoscale_utilisation": (
                "Of a pool, as the autoscaler last saw it; at most autoscale.target_utilisation is wanted.",
                lambda s: [Observation(p.utilisation, {"pool": p.pool}) for p in _scaling(s)],
            ),
            "baton.autoscale_wanted_workers": (
                "Workers that the autoscaler last wanted a pool to have.",
                lambda s: [Observation(p.wanted, {"pool": p.pool}) for p in _scaling(s)],
            ),
            "baton.worker_self_check_ok": ("1 while a worker's own integrity check holds.", _self_checks),
            "baton.mirror_blocks": (
                "Blocks that this router believes a worker to hold; kv_blocks is what the worker itself says.",
                lambda s: [Observation(number, {"worker": worker}) for worker, number in s.mirrored_blocks.items()],
            ),
            "baton.pool_workers": ("Workers of a pool, desired and ready.", _pools),
            "baton.redis_up": ("1 while the router reaches Redis.", lambda s: [Observation(int(s.redis_ok))]),
        }
        observed = [(name, "", text, observe, False) for name, (text, observe) in gauges.items()]
        preempted = "Sequences of a worker that had to give their blocks back and were computed again."
        observed.append(("baton.preemptions", "", preempted, _preemptions, True))
        skipped = (
            "Values in Redis that this router could not read and skipped, once for every time that it came across one, "
            "by what they are: lease, router, event, epoch, boot, ..."
        )
        observed.append(("baton.store_garbage", "", skipped, _store_garbage, True))
        for each, is_counter in ((TRANSFER_COUNTERS, True), (TRANSFER_GAUGES, False)):
            observed += [(name, unit, text, _transfers(fields), is_counter) for name, unit, text, fields in each]
        observed.append(
            (
                "baton.mirror_lag",
                "s",
                "Age of the newest ownership event a router has not seen yet.",
                lambda s: [Observation(r.mirror_lag_s, {"router": r.id}) for r in s.routers],
                False,
            )
        )
        for name, unit, text, observe, is_counter in observed:
            instruments.append(Observed(name, text, partial(self._observed, observe), unit, is_counter=is_counter))
        objectives = _objectives(slo_classes or {})
        instruments.append(
            Observed(
                "baton.slo_objective",
                "Objectives of the SLO classes: ttft, itl and e2e. What a request asks for itself goes before them.",
                lambda: objectives,
                "s",
            )
        )
        if vllm_model:
            served = Served(
                self.time_to_first_token,
                self.inter_token_latency,
                self.request_duration,
                self.stage_duration,
                self.prompt_tokens,
                self.prefix_hit_tokens,
                self.generation_tokens,
                self.finished_choices,
            )
            instruments += aliases(served, status, vllm_model)
        self._instruments = instruments
        self._registry.register(Collector(instruments))

    def catalogue(self) -> dict[str, Definition]:
        """Every metric by the name that Prometheus shows, whether anything was booked or not."""
        return {one.definition.name: one.definition for one in self._instruments}

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def _observed(self, observe: Callable[[ClusterStatus], Iterable[Observation]]) -> Iterable[Observation]:
        return observe(self._status())


def _block_counts(status: ClusterStatus) -> Iterable[Observation]:
    for worker in status.workers:
        labels = {"worker": worker.info.id, "role": worker.info.role.value}
        blocks = worker.load.blocks
        for state, count in (("free", blocks.free), ("cached", blocks.cached), ("in_use", blocks.in_use)):
            yield Observation(count, {**labels, "state": state})


def _sequence_counts(status: ClusterStatus) -> Iterable[Observation]:
    for worker in status.workers:
        labels = {"worker": worker.info.id, "role": worker.info.role.value}
        yield Observation(worker.load.running, {**labels, "state": "running"})
        yield Observation(worker.load.waiting, {**labels, "state": "waiting"})


def _worker_states(status: ClusterStatus) -> Iterable[Observation]:
    for worker in status.workers:
        labels = {"worker": worker.info.id, "role": worker.info.role.value}
        for state in WorkerState:
            yield Observation(int(worker.load.state == state), {**labels, "state": state.value})


def _worker_infos(status: ClusterStatus) -> Iterable[Observation]:
    for worker in status.workers:
        info = worker.info
        yield Observation(
            1,
            {
                "worker": info.id,
                "role": info.role.value,
                "node": info.node,
                "wire_compat": info.wire_compat,
                "block_size": str(info.block_size),
            },
        )


def _scaling(status: ClusterStatus) -> tuple[PoolScaling, ...]:
    return status.controller.scaling if status.controller is not None else ()


def _objectives(slo_classes: Mapping[str, SloClassConfig]) -> list[Observation]:
    """Seconds; nothing for what has no objective."""
    found = []
    for name, slo in slo_classes.items():
        for objective, value_ms in (("ttft", slo.ttft_ms), ("itl", slo.itl_ms), ("e2e", slo.e2e_ms)):
            if math.isfinite(value_ms):
                found.append(Observation(value_ms / 1e3, {"slo_class": name, "objective": objective}))
    return found


def _ready(status: ClusterStatus) -> Iterable[Observation]:
    for worker in status.workers:
        yield Observation(int(worker.load.state == "ready"), {"worker": worker.info.id, "role": worker.info.role.value})


def _self_checks(status: ClusterStatus) -> Iterable[Observation]:
    for worker in status.workers:
        yield Observation(int(worker.load.self_check == "ok"), {"worker": worker.info.id})


def _preemptions(status: ClusterStatus) -> Iterable[Observation]:
    for worker in status.workers:
        labels = {"worker": worker.info.id, "role": worker.info.role.value}
        yield Observation(worker.load.preemptions, labels)


def _store_garbage(status: ClusterStatus) -> Iterable[Observation]:
    return [Observation(each.times, {"what": each.what}) for each in status.store_garbage]


def _transfers(fields: TransferFields) -> Callable[[ClusterStatus], Iterable[Observation]]:
    def observe(status: ClusterStatus) -> Iterable[Observation]:
        for worker in status.workers:
            labels = {"worker": worker.info.id, "role": worker.info.role.value}
            for field, more in fields.items():
                yield Observation(getattr(worker.load.transfers, field), {**labels, **more})

    return observe


def _pools(status: ClusterStatus) -> Iterable[Observation]:
    for name, pool in status.pools.items():
        yield Observation(pool.desired, {"pool": name, "state": "desired"})
        yield Observation(pool.ready, {"pool": name, "state": "ready"})
