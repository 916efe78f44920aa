"""Settings of the KV transfer and of faults that tests inject into it."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from baton.config.section import COMMA_SEPARATED, ON_OFF, WHOLE, AtLeastOne, Must, OneOf, Seconds, String, section
from baton.errors import ConfigError

LINK_KINDS = ("ipc", "nccl", "shm", "tcp")
NCCL_PAIR_BYTES = 42 * 2**20
"""Memory of a GPU that one end of an nccl transport takes at most (`pair-memory` in tests/gpu)."""
NCCL_MODES = ("nonblocking-eager", "nonblocking-lazy", "blocking-eager", "blocking-lazy")
NcclMode: TypeAlias = Annotated[str, OneOf(*NCCL_MODES)]
PlainKind: TypeAlias = Annotated[str, OneOf("nccl")]
LinkKind: TypeAlias = Annotated[str, OneOf(*LINK_KINDS)]


@section("transfer")
class TransferConfig:
    """The KV transfer of KV between workers."""

    slot_bytes: AtLeastOne = 4 * 2**20
    """Largest payload of one chunk in main memory, in bytes. A sender's must not exceed its receivers'."""
    gpu_slot_bytes: AtLeastOne = 32 * 2**20
    """Largest payload of one chunk where slots are in a GPU's memory (ipc, nccl), in bytes; at least slot_bytes. Each
    chunk costs a few waits, which are most of its time at 4 MiB. A sender's must not exceed its receivers'."""
    span_tokens: AtLeastOne = 512
    """Tokens whose KV travels together: a finished prefill chunk is sent while the next is computed. Must be equal on
    all workers; best equal to engine.max_num_batched_tokens."""
    gpu_rings_mib: AtLeastOne = 1024
    """Limit, in MiB, on a GPU's memory that a worker keeps for its ipc connections as a sender: window times
    gpu_slot_bytes each. A connection beyond it is made over the next of the links."""
    num_slots: AtLeastOne = 16
    """Staging slots of a worker, per direction, shared by all its connections. Those over shared memory have their
    own."""
    window: AtLeastOne = 4
    """Staging slots that one connection may hold at a time."""
    max_pairs: Annotated[int, Field(ge=0), WHOLE, Must.be("0 (automatic) or more")] = 0
    """Connections that a sender keeps open, one per pair of ranks; the least recently used one is closed to make room.
    0: per rank 32 on a GPU, of which each nccl connection takes about 30 MB of memory, and 64 on a CPU."""
    open_timeout_s: Seconds = 10.0
    """Longest wait for a connection to another worker, and its transport, to be open."""
    nccl_open_timeout_s: Seconds = 60.0
    """Longest wait for an nccl transport to be open: a GPU opens one after the other. Over tcp KV travels meanwhile."""
    op_timeout_s: Seconds = 10.0
    """Longest wait for one message of a transport, or for the peer's answer to a control message."""
    pull_timeout_s: Seconds = 2.0
    """Longest wait for a prefix pulled from another worker's cache; after it, the prefix is computed."""
    ping_s: Seconds = 2.0
    """Interval at which each side of a connection sends a ping; the sender's ping renews its leases."""
    resend_s: Seconds = 1.0
    """Time after which a control message that the peer has not answered is sent again."""
    lease_s: Seconds = 30.0
    """A reservation is released when its sender has been silent for this long. A sender contacts the
    receiver when a request arrives, not when its prompt is computed."""
    max_unsent_mib: AtLeastOne = 1024
    """Limit, in MiB, on computed KV that waits to be sent. Above it a prefill worker accepts no new prompt; prompts in
    its queue continue while the KV pool has room."""
    checksum: Annotated[str, OneOf("full", "off"), ON_OFF] = "full"
    """full: every chunk carries a checksum that the receiver verifies. off: none does."""
    wire_dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16", "int8")] = "auto"
    """Type in which KV travels. auto: the narrower of the two caches'. int8 has one scale per head and page. A type
    narrower than both caches' is lossy: disaggregated and aggregated answers may then differ."""
    links: Annotated[tuple[LinkKind, ...], COMMA_SEPARATED] = ("ipc", "nccl", "shm", "tcp")
    """Transports to offer and to accept, best first. ipc needs two GPUs of one host, of which the receiver's can read
    the sender's, or one GPU; nccl needs two GPUs and a single rank on both sides; shm needs two CPU caches on one host;
    tcp always works. An nccl transport signals over TCP."""

    plain_links: Annotated[tuple[PlainKind, ...], COMMA_SEPARATED] = ()
    """Transports over which KV may leave a machine unencrypted although the cluster has certificates
    (`cluster.tls_certificate`): nccl, which cannot encrypt. Name it only if nobody else can read or change what passes
    between the GPUs on the network. Both workers must name it; if one does not, KV goes over tcp between machines."""

    nccl_mode: NcclMode = "nonblocking-eager"
    """How nccl transports make and use their communicators, to find out about hangs; equal on all workers. Blocking: a
    call into NCCL returns only when it is through. Lazy: a communicator is made by its first message."""

    def gpu_bytes(self, num_ranks: int) -> int:
        """Returns how much memory of each GPU the transfers of a worker with so many ranks may take, in bytes."""
        over_nccl = "nccl" in self.links and num_ranks == 1
        over_ipc = "ipc" in self.links
        slots = 2 * self.num_slots * self.gpu_slot_bytes if over_nccl or over_ipc else 0  # sent and received
        pairs = (self.max_pairs or 32) * NCCL_PAIR_BYTES if over_nccl else 0
        return slots + pairs + self.gpu_rings_mib * 2**20 * over_ipc

    def __post_init__(self) -> None:
        if not self.links:
            raise ConfigError(f"transfer.links must name at least one of {', '.join(LINK_KINDS)}")
        if self.gpu_slot_bytes < self.slot_bytes:
            raise ConfigError(
                f"transfer.gpu_slot_bytes ({self.gpu_slot_bytes}) must not be less than transfer.slot_bytes "
                f"({self.slot_bytes})"
            )
        for limit, value in (("op_timeout_s", self.op_timeout_s), ("lease_s", self.lease_s)):
            if self.ping_s > value:
                raise ConfigError(f"transfer.ping_s ({self.ping_s}) must not exceed transfer.{limit} ({value})")


@section("faults")
class FaultsConfig:
    """Faults injected on purpose, for tests. Off by default."""

    spec: String = ""
    """Comma-separated NAME=N: inject the fault in every Nth chunk of a KV transfer. The names are the fields of
    `kvstore.transfer.transport.faults.Faults`."""
