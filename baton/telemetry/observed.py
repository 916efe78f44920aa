"""Metrics that are read from the cluster's status at every scrape. A new one is one row of `OBSERVED`.

Every router shows them for all workers, as their leases in Redis report them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from baton.cluster import (
    VERSION,
    BlockCounts,
    ClusterStatus,
    ModelState,
    PoolScaling,
    ServedModel,
    Worker,
    WorkerLoad,
    WorkerState,
)
from baton.config import SloClassConfig
from baton.telemetry.prometheus import Observation

StatusNow = Callable[[], ClusterStatus]
"""Returns the cluster's status for the observed metrics; called at every scrape."""
Observe = Callable[[ClusterStatus], Iterable[Observation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedMetric:
    """Gauge or counter whose rows come from the status."""

    name: str
    description: str
    observe: Observe
    unit: str = ""
    is_counter: bool = False


Labelled = tuple[Worker, dict[str, str]]
"""A worker and the labels of its rows."""


def labelled(status: ClusterStatus) -> Iterator[Labelled]:
    """Yield the workers, each with the labels of its rows: id, role, and its model's name and release."""
    models = {model.content_id: model_labels(model) for model in status.models}
    for worker in status.workers:
        own = {"worker": worker.info.id, "role": worker.info.role.value}
        yield worker, own | models.get(worker.info.content_id, UNKNOWN_MODEL)


def model_labels(model: ServedModel) -> dict[str, str]:
    """Return the labels of a model's rows."""
    return {"model": model.id, "release": model.release}


UNKNOWN_MODEL = {"model": "", "release": ""}


def _counts(labels: Mapping[str, str], counts: BlockCounts) -> Iterable[Observation]:
    for state in ("free", "cached", "in_use"):
        yield Observation(getattr(counts, state), {**labels, "state": state})


def _block_counts(status: ClusterStatus) -> Iterable[Observation]:
    for worker, labels in labelled(status):
        yield from _counts(labels, worker.load.blocks)


def _row_counts(status: ClusterStatus) -> Iterable[Observation]:
    for worker, labels in labelled(status):
        if worker.load.state_rows.total:
            yield from _counts(labels, worker.load.state_rows)


def _sequence_counts(status: ClusterStatus) -> Iterable[Observation]:
    for worker, labels in labelled(status):
        yield Observation(worker.load.running, {**labels, "state": "running"})
        yield Observation(worker.load.waiting, {**labels, "state": "waiting"})


def _open_connections(status: ClusterStatus) -> Iterable[Observation]:
    for worker, labels in labelled(status):
        for each in worker.load.connections:
            yield Observation(each.open_connections, {**labels, "transport": each.transport, "carrier": each.carrier})


def _by_kind(status: ClusterStatus, counts: Callable[[WorkerLoad], tuple[int, int]]) -> Iterable[Observation]:
    """Yield a row for each kind of draft. `counts` returns the count of all kinds, and the draft model's."""
    for worker, labels in labelled(status):
        of_all, of_model = counts(worker.load)
        for kind, count in (("lookup", of_all - of_model), ("model", of_model)):
            yield Observation(count, {**labels, "kind": kind})


def _worker_states(status: ClusterStatus) -> Iterable[Observation]:
    for worker, labels in labelled(status):
        for state in WorkerState:
            yield Observation(int(worker.load.state == state), {**labels, "state": state.value})


def _worker_infos(status: ClusterStatus) -> Iterable[Observation]:
    for worker, labels in labelled(status):
        info = worker.info
        more = {"node": info.node, "wire_compat": info.wire_compat, "block_size": str(info.block_size)}
        makes = {"engine": info.engine, "sampler": info.sampler}
        yield Observation(1, {**labels, **more, **makes})


def _computing(status: ClusterStatus) -> Iterable[Observation]:
    for worker, labels in labelled(status):
        each = worker.info.computes
        types = {"dtype": each.dtype, "weights": each.weights, "kv_dtype": each.kv_dtype}
        ways = {"attention": each.attention, "kv_copies": each.kv_copies, "plans_ahead": str(each.plans_ahead).lower()}
        counts = {"graphs": str(each.num_graphs), "fused": str(each.num_fused), "ranks": str(each.num_ranks)}
        yield Observation(1, {**labels, "gpu": each.gpu, **types, **ways, **counts})


def _malformed(status: ClusterStatus) -> Iterable[Observation]:
    """Yield a row for each member whose counts all routers show."""
    for model in status.models:
        if model.controller is not None:
            labels = {"worker": "controller", "role": "controller", **model_labels(model)}
            yield Observation(model.controller.malformed, labels)
    for worker, labels in labelled(status):
        yield Observation(worker.load.malformed, labels)


def _scaling(status: ClusterStatus, value: Callable[[PoolScaling], float]) -> Iterable[Observation]:
    for model in status.models:
        for each in model.controller.scaling if model.controller is not None else ():
            yield Observation(value(each), {"pool": each.pool, **model_labels(model)})


def _pools(status: ClusterStatus) -> Iterable[Observation]:
    for model in status.models:
        for name, pool in model.pools.items():
            labels = {"pool": name, **model_labels(model)}
            yield Observation(pool.desired, {**labels, "state": "desired"})
            yield Observation(pool.ready, {**labels, "state": "ready"})


def _model_states(status: ClusterStatus) -> Iterable[Observation]:
    for model in status.models:
        for state in ModelState:
            yield Observation(int(model.state is state), {**model_labels(model), "state": state.value})


def _mirrored(status: ClusterStatus) -> Iterable[Observation]:
    for worker, labels in labelled(status):
        of_model = status.mirrored_blocks.get(worker.info.content_id, {})
        if worker.info.id in of_model:
            yield Observation(of_model[worker.info.id], labels)


@dataclass(frozen=True, slots=True)
class TransferRows:
    """Reader of fields of `TransferCounts`, each with the labels that distinguish it from the others of its metric."""

    fields: Mapping[str, Mapping[str, str]]

    def __call__(self, status: ClusterStatus) -> Iterable[Observation]:
        for worker, labels in labelled(status):
            for field, more in self.fields.items():
                yield Observation(getattr(worker.load.transfers, field), {**labels, **more})


def objectives(slo_classes: Mapping[str, SloClassConfig]) -> list[Observation]:
    """Return the objectives in seconds; infinite objectives are omitted."""
    found = []
    for name, slo in slo_classes.items():
        for objective, value_ms in (("ttft", slo.ttft_ms), ("itl", slo.itl_ms), ("e2e", slo.e2e_ms)):
            if math.isfinite(value_ms):
                found.append(Observation(value_ms / 1e3, {"slo_class": name, "objective": objective}))
    return found


DIRECTIONS, OUTCOMES = ("sent", "received"), ("committed", "failed")
FAILURES = ("corrupted", "expired", "timed_out", "refused", "lost")

OBSERVED: tuple[ObservedMetric, ...] = (
    ObservedMetric(name="baton.kv_blocks", description="KV blocks of a worker by state.", observe=_block_counts),
    ObservedMetric(
        name="baton.state_rows",
        description="Rows of recurrent layers' states on a worker: free, cached (snapshots) or in use by sequences. "
        "Absent if the model has no states.",
        observe=_row_counts,
    ),
    ObservedMetric(
        name="baton.worker_sequences", description="Sequences on a worker by state.", observe=_sequence_counts
    ),
    ObservedMetric(
        name="baton.worker_ready",
        description="1 for a worker that takes traffic, else 0.",
        observe=lambda s: [Observation(int(w.load.state == "ready"), labels) for w, labels in labelled(s)],
    ),
    ObservedMetric(
        name="baton.worker_state",
        description="1 for the state that a worker is in, 0 for the others: starting, ready, draining or dead.",
        observe=_worker_states,
    ),
    ObservedMetric(
        name="baton.worker_info",
        description="1 for each worker, with its constant properties as labels.",
        observe=_worker_infos,
    ),
    ObservedMetric(
        name="baton.worker_computes",
        description="1 for each worker, with its hardware and implementations as labels: GPU (empty: CPUs), types, "
        "attention (kernels, flashinfer, torch, native), CUDA graphs, fused parts, ranks, KV copies.",
        observe=_computing,
    ),
    ObservedMetric(
        name="baton.worker_fallbacks",
        description="Number of implementations on a worker that are slower than its device allows: attention by torch, "
        "no CUDA graphs, ... `baton doctor` lists them, with the reason.",
        observe=lambda s: [Observation(len(w.info.computes.fallbacks), labels) for w, labels in labelled(s)],
    ),
    ObservedMetric(
        name="baton.adapters_resident",
        description="LoRA adapters in a worker's memory. Absent if the worker serves none.",
        observe=lambda s: [
            Observation(len(w.load.adapters), labels) for w, labels in labelled(s) if w.info.max_adapters
        ],
    ),
    ObservedMetric(
        name="baton.adapters_registered",
        description="LoRA adapters that are registered, as this router knows them.",
        observe=lambda s: [
            Observation(len(s.adapters.get(model.content_id, ())), model_labels(model)) for model in s.models
        ],
    ),
    ObservedMetric(
        name="baton.build_info",
        description="1, with the version of this router as a label.",
        observe=lambda s: [Observation(1, {"version": VERSION})],
    ),
    ObservedMetric(
        name="baton.autoscale_utilisation",
        description="Utilisation of a pool, as the autoscaler last measured it; its target is "
        "autoscale.target_utilisation.",
        observe=lambda s: _scaling(s, lambda each: each.utilisation),
    ),
    ObservedMetric(
        name="baton.autoscale_wanted_workers",
        description="Number of workers that the autoscaler last wanted a pool to have.",
        observe=lambda s: _scaling(s, lambda each: each.wanted),
    ),
    ObservedMetric(
        name="baton.worker_self_check_ok",
        description="1 while a worker's own integrity check holds, else 0.",
        observe=lambda s: [Observation(int(w.load.self_check == "ok"), labels) for w, labels in labelled(s)],
    ),
    ObservedMetric(
        name="baton.mirror_blocks",
        description="Blocks that a worker holds according to this router's mirror of the index; baton_kv_blocks is the "
        "worker's own count.",
        observe=_mirrored,
    ),
    ObservedMetric(name="baton.pool_workers", description="Workers of a pool, desired and ready.", observe=_pools),
    ObservedMetric(
        name="baton.model_state",
        description="1 for the state that a model is in, 0 for the others: ready, asleep (no workers, a request wakes "
        "it), waking, down (no decode worker is ready) or leaving (it serves no new requests).",
        observe=_model_states,
    ),
    ObservedMetric(
        name="baton.model_share",
        description="Share of the sessions of a model's name that a release gets, relative to its other releases.",
        observe=lambda s: [Observation(model.share, model_labels(model)) for model in s.models],
    ),
    ObservedMetric(
        name="baton.held_requests",
        description="Requests that wait until their model is awake, at all routers.",
        observe=lambda s: [Observation(model.held, model_labels(model)) for model in s.models],
    ),
    ObservedMetric(
        name="baton.model_wake",
        description="Time from the request for a model's latest wake-up to the first ready decode worker; 0: it has "
        "not been woken yet.",
        unit="s",
        observe=lambda s: [Observation(model.wake_s, model_labels(model)) for model in s.models],
    ),
    ObservedMetric(
        name="baton.redis_up",
        description="1 while the router reaches Redis, else 0.",
        observe=lambda s: [Observation(int(s.redis_ok))],
    ),
    ObservedMetric(
        name="baton.preemptions",
        description="Sequences of a worker that were preempted: their blocks were freed and they were computed again.",
        observe=lambda s: [Observation(w.load.preemptions, labels) for w, labels in labelled(s)],
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.drafted_tokens",
        description="Speculative tokens that a worker verified in addition to a sequence's next one, by their source: "
        "lookup in the sequence's own text, or a draft model.",
        observe=lambda s: _by_kind(s, lambda load: (load.drafted_tokens, load.model_drafted_tokens)),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.accepted_tokens",
        description="Speculative tokens that were accepted: a step returned them in addition to a sequence's next one.",
        observe=lambda s: _by_kind(s, lambda load: (load.accepted_tokens, load.model_accepted_tokens)),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.expert_tokens",
        description="Tokens that a worker's model has sent to each expert, over all layers, if its ranks have whole "
        "experts (engine.expert_parallel).",
        observe=lambda s: [
            Observation(number, {**labels, "expert": str(expert)})
            for w, labels in labelled(s)
            for expert, number in enumerate(w.load.expert_tokens)
        ],
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.store_garbage",
        description="Values in Redis that this router could not read and skipped, counted every time, by kind: "
        "lease, router, event, epoch, boot, ...",
        observe=lambda s: [Observation(each.times, {"what": each.what}) for each in s.store_garbage],
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.malformed_messages",
        description="gRPC messages to this router that were rejected because they are not valid protobuf.",
        observe=lambda s: [Observation(s.malformed)],
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.member_malformed_messages",
        description="gRPC messages to a worker, or to the controller, that were rejected because they are not "
        "valid protobuf.",
        observe=_malformed,
        is_counter=True,
    ),
    # KV between workers: KV transfers and pulled prefixes. Both sides count each transfer; the sender counts the
    # seconds.
    ObservedMetric(
        name="baton.kv_transfers",
        description="KV transfers of a worker that ended, by direction and outcome. A transfer that was no longer "
        "needed when it ended is not counted.",
        observe=TransferRows(
            {f"{way}_{end}": {"direction": way, "outcome": end} for way in DIRECTIONS for end in OUTCOMES}
        ),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_transfer_failures",
        description="Failed KV transfers by reason. corrupted: a header or a checksum did not match; expired: the "
        "lease ended; timed_out: one operation took too long; refused: the sides are incompatible; lost: the "
        "connection, its transport or the peer broke.",
        observe=TransferRows({name: {"reason": name} for name in FAILURES}),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_messages_fenced",
        description="Dropped messages and chunks of an unknown or past transfer.",
        observe=TransferRows({"fenced": {}}),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_messages_resent",
        description="Control messages that were sent again because no answer came.",
        observe=TransferRows({"resent": {}}),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_nccl_stalls",
        description="NCCL operations that did not end in time; their connection was closed.",
        observe=TransferRows({"nccl_stalls": {}}),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_nccl_stuck_aborts",
        description="NCCL communicators that could not be ended in time. At two, the worker drains and exits.",
        observe=TransferRows({"nccl_stuck_aborts": {}}),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_nccl_shared_streams",
        description="NCCL communicators that may share a stream of their GPU with another one: they wait for "
        "each other.",
        observe=TransferRows({"nccl_shared_streams": {}}),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_failed_openings",
        description="Transports that could not be opened; another kind carries the KV, and they are retried.",
        observe=TransferRows({"failed_openings": {}}),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_transfer",
        description="Payload of committed KV transfers.",
        observe=TransferRows({f"{way}_bytes": {"direction": way} for way in DIRECTIONS}),
        unit="By",
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_transfer_chunks",
        description="Chunks of committed KV transfers.",
        observe=TransferRows({f"{way}_chunks": {"direction": way} for way in DIRECTIONS}),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_transfer_time",
        description="Total duration of sent KV transfers, each from its first chunk to the acknowledged commit.",
        observe=TransferRows({"transfer_s": {}}),
        unit="s",
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_transfer_exposed_time",
        description="The part of baton_kv_transfer_time_seconds_total after the prompt was computed, which no "
        "computation hid.",
        observe=TransferRows({"exposed_s": {}}),
        unit="s",
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_pulled_tokens",
        description="Prompt tokens pulled from another worker's cache.",
        observe=TransferRows({"pulled_tokens": {}}),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_pull_failures",
        description="Prefixes that could not be pulled and were computed instead.",
        observe=TransferRows({"failed_pulls": {}}),
        is_counter=True,
    ),
    ObservedMetric(
        name="baton.kv_open_connections",
        description="Open connections to other workers, one per sending and receiving rank.",
        observe=TransferRows({"open_connections": {}}),
    ),
    ObservedMetric(
        name="baton.kv_connections",
        description="Open connections to other workers by transport (ipc, nccl, shm, tcp) and, for nccl, by the path "
        "of the bytes (carrier): P2P, SHM, NET/IB, NET/Socket or unknown.",
        observe=_open_connections,
    ),
    ObservedMetric(
        name="baton.kv_staging_slots_in_use",
        description="Staging slots that hold a chunk.",
        observe=TransferRows({"slots_in_use": {}}),
    ),
    ObservedMetric(
        name="baton.kv_unsent",
        description="Bytes of KV that is computed and pinned but not sent yet.",
        observe=TransferRows({"unsent_bytes": {}}),
        unit="By",
    ),
    ObservedMetric(
        name="baton.mirror_lag",
        description="Age of the newest index event that a router has not processed yet.",
        observe=lambda s: [Observation(r.mirror_lag_s, {"router": r.id}) for r in s.routers],
        unit="s",
    ),
)
