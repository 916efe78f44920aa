"""The vocabulary of a running cluster: who is there, in what state, with how much to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version as _version_of

from baton.costs import PRIOR, StepCosts

VERSION = _version_of("baton-serving")
"""Baton's version in this process."""
MAX_WORKERS = 256
"""The most workers that a cluster may have, both pools together."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


def pool_of(worker_id: str) -> Role:
    """The pool in which the worker was started, whatever its role is now. It runs on a node for that pool."""
    return Role(worker_id.rpartition("-")[0])


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
    """Did not arrive though they were still wanted."""
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
    """Failed: the link, the session or the other worker was lost."""
    fenced: int = 0
    """Messages and chunks of an unknown transfer or a past generation, dropped."""
    resent: int = 0
    """Messages said again because no answer came."""
    nccl_stalls: int = 0
    """Operations on NCCL that did not end in time; the pair was given up."""
    failed_pulls: int = 0
    """Prefixes that were to be pulled and had to be computed."""
    pulled_tokens: int = 0
    """Prompt tokens whose KV came from another worker's cache."""
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_chunks: int = 0
    received_chunks: int = 0
    transfer_s: float = 0.0
    """From a sent transfer's first chunk to its acknowledged commit, summed."""
    exposed_s: float = 0.0
    """The part of it after the prompt was computed: what no computing hid."""
    open_pairs: int = 0
    slots_in_use: int = 0
    """Of the staging pools."""
    unsent_bytes: int = 0
    """Computed, pinned, and not sent yet."""

    @property
    def committed(self) -> int:
        return self.sent_committed + self.received_committed

    @property
    def failed(self) -> int:
        return self.sent_failed + self.received_failed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker says of itself once per incarnation."""

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
    """Of Baton; empty: of a release that did not tell."""
    known_fields: str = ""
    """The fields of a router's messages that this worker knows, as `baton.wire` writes and reads them. A worker that
    lists none is asked for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a worker says of itself with every renewal of its lease."""

    state: WorkerState = WorkerState.STARTING
    running: int = 0
    """Sequences in the engine's batch."""
    waiting: int = 0
    """Sequences that wait for blocks or for their KV."""
    queued_tokens: int = 0
    """Tokens that are still to be computed there: known, and neither computed nor cached."""
    blocks: BlockCounts = field(default_factory=BlockCounts)
    self_check: str = "ok"
    transfers: TransferCounts = field(default_factory=TransferCounts)
    preemptions: int = 0
    """Sequences that had to give their blocks back and were computed again, since the worker started."""
    costs: StepCosts = PRIOR
    """What the engine's steps take, fitted from those that it has done."""
    busy_s: float = 0.0
    """Spent in steps, since the worker started."""
    computed_tokens: int = 0
    """In those steps."""


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
    """Those that were let in, and came too late or failed."""
    rejected: int = 0
    version: str = ""


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """What the autoscaler last saw of a pool, and wants of it."""

    pool: str
    utilisation: float
    """Workers that would be busy all the time, over those that are desired."""
    wanted: int


@dataclass(frozen=True, slots=True)
class ControllerInfo:
    """The process that keeps the pools as they should be."""

    pid: int
    address: str
    """host:port of its `Admin` service."""
    scaling: tuple[PoolScaling, ...] = ()
    """Empty: the autoscaler is off, or has not decided yet."""
    version: str = ""


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
    """Values of one kind in Redis that could not be read and were skipped, since the process started."""

    what: str
    times: int
    """Once for every time that one was come across."""
    latest: str
    """Where one lies, and what is wrong with it."""


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
    """By worker: how many blocks the router that answers believes it to hold."""
    store_garbage: tuple[StoreGarbage, ...] = ()
    """As the router that answers came across it."""
