"""Settings of the KV transfer."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from baton.config.section import COMMA_SEPARATED, ON_OFF, WHOLE, AtLeastOne, Must, OneOf, Seconds, section
from baton.errors import ConfigError

TRANSPORT_NAMES = ("ipc", "nccl", "shm", "tcp")
NCCL_CONNECTION_BYTES = 42 * 2**20
"""Maximum GPU memory of one side of an nccl transport, in bytes (`pair-memory` in tests/gpu)."""
PlainKind: TypeAlias = Annotated[str, OneOf("nccl")]
TransportName: TypeAlias = Annotated[str, OneOf(*TRANSPORT_NAMES)]


@section("transfer")
class TransferConfig:
    """KV transfer between workers."""

    slot_bytes: AtLeastOne = 4 * 2**20
    """Maximum payload of one chunk in main memory, in bytes. A sender's value must not exceed its receivers' values."""
    gpu_slot_bytes: AtLeastOne = 32 * 2**20
    """Maximum payload of one chunk if slots are in a GPU's memory (ipc, nccl), in bytes; at least slot_bytes. Each
    chunk costs a few waits, which dominate its time at 4 MiB. A sender's value must not exceed its receivers'
    values."""
    span_tokens: AtLeastOne = 512
    """Number of tokens whose KV is sent together: a finished prefill chunk is sent while the next one is computed. Must
    be the same on all workers; engine.max_num_batched_tokens is the best value."""
    gpu_rings_mib: AtLeastOne = 1024
    """Maximum GPU memory for a worker's outgoing ipc buffers, in MiB; each connection uses window * gpu_slot_bytes.
    When it is exhausted, new connections fall back to the next transport in `transports`."""
    num_slots: AtLeastOne = 16
    """Staging slots of a worker, per direction, shared by all its connections except those over shared memory, which
    have their own."""
    window: AtLeastOne = 4
    """Maximum number of staging slots that one connection holds at a time."""
    max_connections: Annotated[int, Field(ge=0), WHOLE, Must.be("0 (automatic) or more")] = 0
    """Maximum number of open connections of a sender, one per pair of ranks; a new connection closes the least recently
    used one. 0: 32 per rank on a GPU, where each nccl connection uses about 30 MB of memory, and 64 per rank on a
    CPU."""
    open_timeout_s: Seconds = 10.0
    """Timeout for opening a connection to another worker, with its transport."""
    nccl_open_timeout_s: Seconds = 60.0
    """Timeout for opening an nccl transport; a GPU opens them one after the other. Until it is open, KV is sent over
    tcp."""
    op_timeout_s: Seconds = 10.0
    """Timeout for one message of a transport, and for the peer's reply to a control message."""
    pull_timeout_s: Seconds = 2.0
    """Timeout for pulling a prefix from another worker's cache; after it, the prefix is computed."""
    ping_s: Seconds = 2.0
    """Interval at which each side of a connection sends a ping; the sender's ping renews its leases."""
    resend_s: Seconds = 1.0
    """Time after which a control message without a reply is sent again."""
    lease_s: Seconds = 30.0
    """A reservation is released if its sender has been silent for this long. The sender contacts the receiver when a
    request arrives, not when its prompt is computed."""
    max_unsent_mib: AtLeastOne = 1024
    """Maximum computed KV that waits to be sent, in MiB. Above it a prefill worker accepts no new prompt; prompts in
    its queue continue while the KV pool has room."""
    checksum: Annotated[str, OneOf("full", "off"), ON_OFF] = "full"
    """full: every chunk carries a checksum that the receiver verifies. off: no checksums."""
    wire_dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16", "int8")] = "auto"
    """Type in which KV is sent. auto: the narrower type of the two caches. int8 has one scale per head and page. A type
    that is narrower than both caches' types is lossy: disaggregated and aggregated outputs may then differ."""
    transports: Annotated[tuple[TransportName, ...], COMMA_SEPARATED] = ("ipc", "nccl", "shm", "tcp")
    """Transports that a worker offers and accepts, preferred first. ipc requires that both workers use the same GPU, or
    two GPUs of one host with peer access from the receiver to the sender. nccl requires two GPUs, and a single rank on
    both sides. shm requires two CPU caches on one host. tcp always works. An nccl transport signals over TCP."""

    plaintext_transports: Annotated[tuple[PlainKind, ...], COMMA_SEPARATED] = ()
    """Transports over which KV may leave a machine unencrypted even if the cluster has certificates
    (`cluster.tls_certificate`): nccl, which cannot encrypt. Set it only if the network between the GPUs is private.
    Both workers must set it; otherwise KV between machines is sent over tcp."""

    def gpu_bytes(self, num_ranks: int) -> int:
        """Return the maximum memory of each GPU that the transfers of a worker with `num_ranks` ranks use, in bytes."""
        over_nccl = "nccl" in self.transports and num_ranks == 1
        over_ipc = "ipc" in self.transports
        slots = 2 * self.num_slots * self.gpu_slot_bytes if over_nccl or over_ipc else 0  # sent and received
        connections = (self.max_connections or 32) * NCCL_CONNECTION_BYTES if over_nccl else 0
        return slots + connections + self.gpu_rings_mib * 2**20 * over_ipc

    def __post_init__(self) -> None:
        if not self.transports:
            raise ConfigError(f"transfer.transports must name at least one of {', '.join(TRANSPORT_NAMES)}")
        if self.gpu_slot_bytes < self.slot_bytes:
            raise ConfigError(
                f"transfer.gpu_slot_bytes ({self.gpu_slot_bytes}) must not be less than transfer.slot_bytes "
                f"({self.slot_bytes})"
            )
        for limit, value in (("op_timeout_s", self.op_timeout_s), ("lease_s", self.lease_s)):
            if self.ping_s > value:
                raise ConfigError(f"transfer.ping_s ({self.ping_s}) must not exceed transfer.{limit} ({value})")
