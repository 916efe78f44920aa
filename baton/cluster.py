"""The vocabulary of a running cluster: who is there, in what state, with how much to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version_of

from baton.costs import PRIOR, StepCosts

try:
    VERSION = _version_of("baton-serving")
except PackageNotFoundError:  # the sources alone, as on a bare GPU machine
    VERSION = ""
"""Baton's version in this process."""
MAX_WORKERS = 256
"""The most workers that a cluster may have, both pools together."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


def with_role(worker_id: str, role: str) -> str:
    """Returns what people are shown of a worker: its id names no role, since it stays when the role changes."""
    return f"{worker_id} ({role})" if role else worker_id


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """`free + cached + in_use == total` on a worker that is well."""

    total: int = 0
    free: int = 0
    cached: int = 0
    in_use: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCounts:
    """A worker's KV transfers since it started, sent and received; the last three are as of now."""

    sent_committed: int = 0
    received_committed: int = 0
    sent_failed: int = 0
    """Transfers that were still needed and did not arrive."""
    received_failed: int = 0
    corrupted: int = 0
    """Failed, sent or received: a chunk failed its header or checksum test. This and the next four are all failures."""
    expired: int = 0
    """Failed: the lease ended before the KV arrived."""
    timed_out: int = 0
    """Failed: one operation took too long."""
    refused: int = 0
    """Failed: the two sides do not fit."""
    lost: int = 0
    """Failed: the connection, its transport or the other worker was lost."""
    fenced: int = 0
    """Messages and chunks of an unknown transfer or a past generation, dropped."""
    resent: int = 0
    """Control messages that were sent again because no answer came."""
    nccl_stalls: int = 0
    """NCCL operations that did not end in time; their connection was given up."""
    nccl_stuck_aborts: int = 0
    """NCCL communicators that could not be ended in time; each may keep memory of the GPU. At two the worker leaves."""
    nccl_shared_streams: int = 0
    """NCCL communicators that may have a stream of the GPU in common with another one, and so wait for it."""
    failed_openings: int = 0
    """Transports that could not be opened, by senders; another kind carries the KV, and they are tried again."""
    failed_pulls: int = 0
    """Prefixes that could not be pulled and were computed instead."""
    pulled_tokens: int = 0
    """Prompt tokens whose KV came from another worker's cache."""
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_chunks: int = 0
    received_chunks: int = 0
    transfer_s: float = 0.0
    """Total duration of sent transfers, each from its first chunk to the acknowledged commit."""
    exposed_s: float = 0.0
    """The part of `transfer_s` after the prompt was computed, which no computation hid."""
    open_pairs: int = 0
    slots_in_use: int = 0
    """Slots of the staging pools that hold a chunk."""
    unsent_bytes: int = 0
    """Bytes of KV that is computed, pinned and not sent yet."""

    @property
    def committed(self) -> int:
        return self.sent_committed + self.received_committed

    @property
    def failed(self) -> int:
        return self.sent_failed + self.received_failed


@dataclass(frozen=True, slots=True)
class OpenLinks:
    """Open connections of one kind to other workers."""

    link: str
    """The transport: ipc, nccl, shm or tcp."""
    transport: str
    """What NCCL moves the bytes by: P2P, SHM, NET/IB, NET/Socket or unknown; empty for other kinds."""
    open_pairs: int


MAX_REASON = 300
"""Most characters of a reason that other processes show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computes:
    """What a worker computes with. Texts are empty where that is not known, or nothing to choose."""

    gpu: str = ""
    """Name of its GPU; empty: it computes on CPUs."""
    num_ranks: int = 1
    dtype: str = ""
    """The type of its arithmetic."""
    weights: str = ""
    """What the weights were made to (`model.weights`)."""
    kv_dtype: str = ""
    """The type of the KV pages."""
    attention: str = ""
    """kernels, flashinfer (with kernels for prompts), torch or native."""
    num_graphs: int = 0
    """CUDA graphs of decode steps."""
    num_fused: int = 0
    """Parts of the model that are computed by fused kernels."""
    plans_ahead: bool = False
    """Whether a step is planned while the one before it runs."""
    kv_copies: str = ""
    """Whether kernels or torch copy chunks of KV: "kernels" or "torch". The worker chooses when it starts."""
    fallbacks: tuple[str, ...] = ()
    """What is slower than it could be on such a device, each with its reason."""

    def in_words(self) -> str:
        """Returns all but the fallbacks, for people."""
        if not self.dtype:
            return "unknown"
        types = [self.dtype, f"weights {self.weights}" if self.weights not in ("", "exact") else ""]
        types.append(f"KV {self.kv_dtype}" if self.kv_dtype not in ("", self.dtype) else "")
        ways = [f"attention {self.attention}" if self.attention else ""]
        if self.gpu:
            ways += [f"{self.num_graphs or 'no'} CUDA graphs", f"{self.num_fused or 'no'} fused parts"]
        ways.append("planned ahead" if self.plans_ahead else "")
        ways.append(f"KV copied by {self.kv_copies}" if self.kv_copies else "")
        ranks = f"{self.num_ranks} x " if self.num_ranks > 1 else ""
        return ", ".join(filter(None, (f"{ranks}{self.gpu or 'CPU'}", *types, *ways)))


def fallback(what: str, reason: str) -> str:
    """Returns an entry of `Computes.fallbacks`: the reason may be a library's, and is shown in terminals."""
    shown = "".join(each if each.isprintable() else " " for each in reason)
    return f"{what}: {shown[:MAX_REASON]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """The constant properties of a worker's incarnation."""

    id: str
    role: Role
    address: str
    """host:port of its gRPC server."""
    pid: int
    node: str
    epoch: int
    """Rises with every incarnation of the same id: a restarted worker is a new owner."""
    content_id: str
    wire_compat: str
    block_size: int
    max_model_len: int
    chunk_tokens: int = 512
    """Prompt tokens in one step."""
    version: str = ""
    """Baton's version there; empty: a release that did not announce it."""
    known_fields: str = ""
    """The fields of a router's messages that this worker knows, as `baton.wire` writes and reads them. A worker that
    lists none is asked for nothing."""
    engine: str = ""
    """The engine that computes there; empty: a release that did not announce it."""
    sampler: str = ""
    """The contract of its random numbers: samplers of one name draw the same token from the same logits, seed, choice
    and position. Empty: a release that did not announce it, which counts as a sampler of a name of its own."""
    incarnation: str = ""
    """The identity of its process, to which KV transfers and the proofs of calls are bound. Empty: a release that did
    not
    announce it, to which no connection is opened ahead."""
    computes: Computes = Computes()

    @property
    def label(self) -> str:
        """The worker as people are shown it."""
        return with_role(self.id, self.role)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The state of a worker, as of the latest renewal of its lease."""

    state: WorkerState = WorkerState.STARTING
    running: int = 0
    """Sequences in the engine's batch."""
    waiting: int = 0
    """Sequences that wait for blocks or for incoming KV."""
    queued_tokens: int = 0
    """Tokens still to compute: known, and neither computed nor cached."""
    blocks: BlockCounts = field(default_factory=BlockCounts)
    self_check: str = "ok"
    transfers: TransferCounts = field(default_factory=TransferCounts)
    links: tuple[OpenLinks, ...] = ()
    preemptions: int = 0
    """Preemptions since the worker started: sequences that gave their blocks back and were computed again."""
    costs: StepCosts = PRIOR
    """Cost model of the engine's steps, fitted to those that it has done."""
    busy_s: float = 0.0
    """Time spent in steps since the worker started."""
    computed_tokens: int = 0
    """Tokens computed in those steps, without drafts that proved wrong."""
    drafted_tokens: int = 0
    """Tokens that were guessed and checked, since the worker started."""
    accepted_tokens: int = 0
    """Guessed tokens that proved right, since the worker started."""
    model_drafted_tokens: int = 0
    """Guessed tokens that a draft model proposed."""
    model_accepted_tokens: int = 0
    """Guessed tokens that a draft model proposed and that proved right."""
    malformed: int = 0
    """Messages that the worker was sent and that are not in protobuf's form."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as its lease describes it."""

    info: WorkerInfo
    load: WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterInfo:
    id: str
    pid: int
    grpc: str
    http: str
    mirror_lag_s: float
    met: int = 0
    """Requests since the router started that met their objectives."""
    missed: int = 0
    """Admitted requests that missed an objective or failed."""
    rejected: int = 0
    version: str = ""
    ready_workers: int = 0
    """Workers that it knows to be ready."""


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """The autoscaler's latest measurement and decision for a pool."""

    pool: str
    utilisation: float
    """Workers' worth of load, over the number of desired workers."""
    wanted: int
    """Number of workers that the autoscaler wants."""


@dataclass(frozen=True, slots=True)
class PoolTrouble:
    """What keeps a pool from its size."""

    pool: str
    num_unplaced: int
    """Workers that wait for a node with room for them."""
    num_failures: int
    """Times that a worker died or could not start, since the controller's own start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerInfo:
    """The process that keeps the pools at their sizes."""

    pid: int
    address: str
    """host:port of its `Admin` service."""
    scaling: tuple[PoolScaling, ...] = ()
    """Empty: the autoscaler is off, or has not decided yet."""
    version: str = ""
    incarnation: str = ""
    """The random identity of its process, to which the proof of a call is bound."""
    malformed: int = 0
    """Messages that it was sent and that are not in protobuf's form."""
    trouble: tuple[PoolTrouble, ...] = ()
    """One for each pool; empty: it has not looked yet."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    desired: int
    ready: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    id: str
    path: str


@dataclass(frozen=True, slots=True)
class StoreGarbage:
    """Values of one kind in Redis that could not be read and were skipped since the process started."""

    what: str
    times: int
    """How often such a value was read."""
    latest: str
    """The key of the latest one, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The memory of the Redis that holds leases and index."""

    used_bytes: int
    limit_bytes: int
    """0: it has no limit of its own."""
    num_evicted: int
    """Keys that it removed to make room, since it started."""


@dataclass(frozen=True, slots=True)
class CertificateTerm:
    """The time for which a certificate is valid, as Unix times."""

    name: str
    """Who shows it: members or routers."""
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """`baton status`: field names are public."""

    pools: dict[str, PoolStatus]
    workers: tuple[Worker, ...]
    routers: tuple[RouterInfo, ...]
    redis_address: str
    redis_ok: bool
    models: tuple[ServedModel, ...]
    controller: ControllerInfo | None = None
    """None: none is known."""
    mirrored_blocks: dict[str, int] = field(default_factory=dict)
    """Blocks that each worker holds according to the answering router's copy of the index."""
    store_garbage: tuple[StoreGarbage, ...] = ()
    """Unreadable values that the answering router has met."""
    malformed: int = 0
    """Messages that the answering router was sent and that are not in protobuf's form."""
    store_memory: StoreMemory | None = None
    """None: the answering router has not read it, or may not."""
    certificates: tuple[CertificateTerm, ...] = ()
    """The terms of those that the answering router uses; empty: it speaks in plain text."""
