"""Types that describe a running cluster: its members, their states and their load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version_of
from typing import TYPE_CHECKING

from baton.costs import PRIOR, StepCosts

if TYPE_CHECKING:
    from baton.registered_adapters import Adapters

try:
    VERSION = _version_of("baton-serving")
except PackageNotFoundError:  # only the sources are there, as on a bare GPU machine
    VERSION = ""
"""Baton's version in this process."""
MAX_WORKERS = 1024
"""Maximum number of workers of a cluster, in both pools together."""
MAX_LISTED_ADAPTERS = 256
"""Maximum number of adapters in memory that a worker's lease lists, so that a lease stays short."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


def with_role(worker_id: str, role: str) -> str:
    """Return a worker's display name: its id contains no role, since the id stays when the role changes."""
    return f"{worker_id} ({role})" if role else worker_id


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """`free + cached + in_use == total` on a worker in good order."""

    total: int = 0
    free: int = 0
    cached: int = 0
    in_use: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCounts:
    """KV transfers of a worker since it started, sent and received; the last three fields are current values."""

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
    """Failed: the two sides are incompatible."""
    lost: int = 0
    """Failed: the connection, its transport or the other worker was lost."""
    fenced: int = 0
    """Dropped messages and chunks of an unknown transfer or a past generation."""
    resent: int = 0
    """Control messages that were sent again because no answer came."""
    nccl_stalls: int = 0
    """NCCL operations that did not end in time; their connection was closed."""
    nccl_stuck_aborts: int = 0
    """NCCL communicators that could not be ended in time; each may keep GPU memory. At two, the worker shuts down."""
    nccl_shared_streams: int = 0
    """NCCL communicators that may share a GPU stream with another one, and so wait for it."""
    failed_openings: int = 0
    """Transports that senders could not open; another kind carries the KV, and they are retried."""
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
    open_connections: int = 0
    slots_in_use: int = 0
    """Slots of the staging pools that hold a chunk."""
    unsent_bytes: int = 0
    """Bytes of KV that is computed and pinned but not sent yet."""

    @property
    def committed(self) -> int:
        return self.sent_committed + self.received_committed

    @property
    def failed(self) -> int:
        return self.sent_failed + self.received_failed


@dataclass(frozen=True, slots=True)
class OpenConnections:
    """Open connections of one kind to other workers."""

    transport: str
    """Kind of transport: ipc, nccl, shm or tcp."""
    carrier: str
    """Path by which NCCL carries the bytes: P2P, SHM, NET/IB, NET/Socket or unknown; empty for other kinds."""
    open_connections: int


MAX_REASON = 300
"""Maximum length in characters of a reason that other processes show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computes:
    """Hardware and implementations that a worker computes with. A text is empty if unknown or not applicable."""

    gpu: str = ""
    """Name of its GPU; empty: it computes on CPUs."""
    num_ranks: int = 1
    dtype: str = ""
    """Data type of its arithmetic."""
    weights: str = ""
    """Weight format (`model.weights`)."""
    kv_dtype: str = ""
    """Data type of the KV pages."""
    attention: str = ""
    """kernels, flashinfer (with kernels for prompts), torch or native."""
    num_graphs: int = 0
    """Number of CUDA graphs of decode steps."""
    num_fused: int = 0
    """Number of model parts that fused kernels compute."""
    plans_ahead: bool = False
    """True if a step is planned while the previous one runs."""
    kv_copies: str = ""
    """Implementation that copies chunks of KV: "kernels" or "torch". The worker chooses when it starts."""
    fallbacks: tuple[str, ...] = ()
    """Parts that are slower than they could be on such a device, each with its reason."""

    def in_words(self) -> str:
        """Return everything but the fallbacks, as text for people."""
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
    """Return an entry of `Computes.fallbacks`. The reason may come from a library, and is shown in terminals."""
    shown = "".join(each if each.isprintable() else " " for each in reason)
    return f"{what}: {shown[:MAX_REASON]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Constant properties of a worker's incarnation."""

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
    """The worker's version of Baton; empty: a release that did not announce it."""
    known_fields: str = ""
    """Fields of a router's messages that this worker knows, in the encoding of `baton.wire`.

    A router sends no request to a worker that lists none.
    """
    engine: str = ""
    """Engine of the worker; empty: a release that did not announce it."""
    sampler: str = ""
    """Contract of its random numbers.

    Samplers of one name draw the same token from the same logits, seed, choice and position. Empty: a release that did
    not announce it, which counts as a separate sampler.
    """
    incarnation: str = ""
    """Identity of its process, to which KV transfers and the proofs of calls are bound.

    Empty: a release that did not announce it, to which no connection is opened ahead.
    """
    computes: Computes = Computes()
    resumes_anywhere: bool = True
    """True if the worker can continue a sequence after each block that it caches.

    False: its model has states or windows, and it publishes only the keys that all of its pools hold.
    """
    max_adapters: int = 0
    """Maximum number of LoRA adapters in memory at a time; 0: it serves none, or its release does not report it."""
    takes_images: bool = False
    """True if its model takes images, and it can compute them."""
    image_placeholder: int = 0
    """Token that stands once per image in a prompt that the chat template has written; of no meaning if the worker
    takes no images."""
    files: str = ""
    """Digest of the files that routers need to serve its model (`baton.serving_files`); empty: it provides none."""

    @property
    def label(self) -> str:
        """Display name of the worker."""
        return with_role(self.id, self.role)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """State of a worker, as of the latest renewal of its lease."""

    state: WorkerState = WorkerState.STARTING
    running: int = 0
    """Sequences in the engine's batch."""
    waiting: int = 0
    """Sequences that wait for blocks or for incoming KV."""
    queued_tokens: int = 0
    """Known tokens that are neither computed nor cached yet."""
    blocks: BlockCounts = field(default_factory=BlockCounts)
    state_rows: BlockCounts = field(default_factory=BlockCounts)
    """Rows of recurrent layers' states; `cached`: snapshots. A total of 0: the model has no states, or the worker's
    release does not report them."""
    self_check: str = "ok"
    transfers: TransferCounts = field(default_factory=TransferCounts)
    connections: tuple[OpenConnections, ...] = ()
    preemptions: int = 0
    """Preemptions since the worker started: sequences whose blocks were freed and that were computed again."""
    costs: StepCosts = PRIOR
    """Cost model of the engine's steps, fitted to its past steps."""
    busy_s: float = 0.0
    """Time spent in steps since the worker started."""
    computed_tokens: int = 0
    """Tokens computed in those steps, without rejected drafts."""
    drafted_tokens: int = 0
    """Speculative tokens that were verified, since the worker started."""
    accepted_tokens: int = 0
    """Speculative tokens that were accepted, since the worker started."""
    model_drafted_tokens: int = 0
    """Speculative tokens that a draft model proposed."""
    model_accepted_tokens: int = 0
    """Speculative tokens that a draft model proposed and that were accepted."""
    malformed: int = 0
    """Received messages that were not valid protobuf."""
    expert_tokens: tuple[int, ...] = ()
    """Tokens that the worker's model has sent to each expert, over all layers, since the worker started. Empty: the
    experts are not divided among ranks (`engine.expert_parallel`)."""
    adapters: tuple[str, ...] = ()
    """Digests of the LoRA adapters in memory, at most `MAX_LISTED_ADAPTERS` of them."""
    adapter_load_s: float = 0.0
    """Time to load an adapter, in seconds, as measured; 0: it has loaded none."""
    number: int = 0
    """Number of this report of the worker, which rises with each change; 0: its release does not count them."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as its lease describes it."""

    info: WorkerInfo
    load: WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedModel:
    """Counts of a router for one model. Counts of requests are since the router started."""

    content_id: str
    met: int = 0
    missed: int = 0
    rejected: int = 0
    ready_workers: int = 0
    in_flight: int = 0
    """Requests that have arrived and not ended."""
    held: int = 0
    """Requests in flight that wait until the model is awake."""


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
    models: tuple[RoutedModel, ...] = ()
    """Counts by model; empty: the router has no models, or is of a release that served one model only."""

    def of_model(self, content_id: str) -> RoutedModel:
        """Return its counts for one model; zeros if it does not serve the model."""
        return next((each for each in self.models if each.content_id == content_id), RoutedModel(content_id=content_id))


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """The autoscaler's latest measurement and decision for a pool."""

    pool: str
    utilisation: float
    """Load in units of one worker's capacity, divided by the number of desired workers."""
    wanted: int
    """Number of workers that the autoscaler wants."""


@dataclass(frozen=True, slots=True)
class PoolTrouble:
    """Reasons why a pool does not have its desired size."""

    pool: str
    num_unplaced: int
    """Workers that wait for a node with capacity for them."""
    num_failures: int
    """Number of times that a worker died or could not start, since the controller started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerInfo:
    """The process that keeps the pools at their sizes."""

    pid: int
    address: str
    """host:port of its `Admin` service."""
    cluster: str = ""
    """Name of its cluster, which is the Ray namespace of its workers; empty: its release does not report it."""
    scaling: tuple[PoolScaling, ...] = ()
    """Empty: the autoscaler is off, or has not decided yet."""
    version: str = ""
    incarnation: str = ""
    """Random identity of its process, to which the proof of a call is bound."""
    malformed: int = 0
    """Received messages that were not valid protobuf."""
    trouble: tuple[PoolTrouble, ...] = ()
    """One entry per pool; empty: it has not checked yet."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    desired: int
    ready: int
    engine: tuple[str, ...] = ()
    """Settings of its workers' engine that differ from the other pool's, such as tensor_parallel=2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnnouncement:
    """A model as its controller announces it to the routers of an endpoint. See docs/decisions/0020."""

    content_id: str
    name: str
    """Name under which clients request it. Several releases may have the same name."""
    path: str
    """Folder or hub id of the model, for operators."""
    release: str
    """Name of the release, unique at the endpoint."""
    share: float = 1.0
    """Share of the sessions of its name, relative to the other releases of the name; 0: none."""
    files: str
    """Digest of the files with which a router serves it (`baton.serving_files`), in hexadecimal digits."""
    max_model_len: int = 0
    """Configured limit of the context window; 0: the model's own."""
    weights: str = "exact"
    kv_dtype: str = "auto"
    mode: str = "auto"
    """Mode of its placement (`router.mode`)."""
    created_s: int = 0
    """Unix time of its first announcement."""
    is_asleep: bool = False
    """True if the model is asleep or wakes: routers hold its requests."""
    wake_s: float = 0.0
    """Seconds from the request for the latest wake-up to the first ready decode worker; 0: there was none yet."""
    problem: str = ""
    """Reason why a wake-up makes no progress; empty: none is known."""
    is_leaving: bool = False
    """True if its controller is about to end its workers: new requests are refused, and running ones complete."""


class ModelState(StrEnum):
    """State of a model as a router sees it."""

    READY = "ready"
    ASLEEP = "asleep"
    """The model has no workers, because it had no requests; the next request wakes it."""
    WAKING = "waking"
    """The model was asleep, and its workers start."""
    DOWN = "down"
    """No decode worker is ready."""
    LEAVING = "leaving"
    """The model serves no new requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as the answering router serves it."""

    id: str
    """Name under which clients request it."""
    path: str
    content_id: str = ""
    release: str = ""
    share: float = 1.0
    state: ModelState = ModelState.READY
    pools: Mapping[str, PoolStatus] = field(default_factory=dict)
    controller: ControllerInfo | None = None
    held: int = 0
    """Requests that wait until it is awake, at all routers."""
    wake_s: float = 0.0
    """See `ModelAnnouncement.wake_s`."""
    problem: str = ""
    """See `ModelAnnouncement.problem`."""


@dataclass(frozen=True, slots=True)
class StoreGarbage:
    """Values of one kind in Redis that could not be read and were skipped since the process started."""

    what: str
    times: int
    """Number of times that such a value was read."""
    latest: str
    """Key of the latest one, and the reason why it is invalid."""


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """Memory of the Redis that holds leases and index."""

    used_bytes: int
    limit_bytes: int
    """0: Redis has no limit."""
    num_evicted: int
    """Keys that it has evicted since it started."""


@dataclass(frozen=True, slots=True)
class CertificateTerm:
    """Validity period of a certificate, as Unix times."""

    name: str
    """Owner of the certificate: members or routers."""
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """Output of `baton status`: field names are public."""

    pools: dict[str, PoolStatus]
    workers: tuple[Worker, ...]
    routers: tuple[RouterInfo, ...]
    redis_address: str
    redis_ok: bool
    models: tuple[ServedModel, ...]
    controller: ControllerInfo | None = None
    """None: no controller is known."""
    mirrored_blocks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Content id -> worker -> number of its blocks in the answering router's mirror of the model's index."""
    store_garbage: tuple[StoreGarbage, ...] = ()
    """Unreadable values that the answering router has met."""
    malformed: int = 0
    """Messages received by the answering router that were not valid protobuf."""
    store_memory: StoreMemory | None = None
    """None: the answering router has not read it, or has no permission."""
    certificates: tuple[CertificateTerm, ...] = ()
    """Validity periods of the answering router's certificates; empty: it uses plain text."""
    adapters: Mapping[str, Adapters] = field(default_factory=dict)
    """Content id -> registered LoRA adapters of the model by name, as the answering router knows them."""
