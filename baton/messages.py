"""What processes say to each other, as plain values. `baton.wire` turns them into protobuf and back.

Router -> worker: `SequenceSpec`, answered by `FirstToken` and `HandedOver` (prefill) or `Ticket` and `NewTokens`
(decode). Prefill <-> decode: the messages of one KV session, `FromPrefill` and `FromDecode`.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One choice of one request, as the engine needs it."""

    request_id: str
    choice_index: int
    token_ids: tuple[int, ...]
    """Prompt, followed by the tokens already generated when a choice is resumed."""
    num_prompt_tokens: int
    max_tokens: int
    """Of the whole answer, tokens already generated included."""
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    cache_seed: bytes
    attempt: int = 0
    """One more each time the choice is placed again."""

    @property
    def sequence_id(self) -> str:
        return f"{self.request_id}/{self.choice_index}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A decode worker's promise of blocks for one transfer."""

    transfer_id: str
    generation: int
    """Unique per reservation in the life of a decode worker's process."""
    decode_worker_id: str
    incarnation: str
    """Of the decode worker: one per process start."""
    kv_address: str
    num_tokens: int
    """Tokens whose KV is handed over; the sequence's length before the first token."""
    skip_tokens: int
    """Leading tokens whose blocks the decode worker already holds; a multiple of the block size."""
    lease_ms: int
    wire_compat: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    token_id: int
    finish_reason: FinishReason | None
    num_cached_tokens: int
    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class HandedOver:
    num_bytes: int
    num_chunks: int
    transfer_s: float


@dataclass(frozen=True, slots=True)
class NewTokens:
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0


# The KV session. Every message about a transfer names its generation, so that one about a past reservation is dropped.


@dataclass(frozen=True, slots=True)
class Hello:
    protocol_version: int
    worker_id: str
    incarnation: str
    wire_compat: str
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Welcome:
    incarnation: str
    link: str
    pair_epoch: int


@dataclass(frozen=True, slots=True)
class Rendezvous:
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Offer:
    transfer_id: str
    generation: int
    plan_digest: bytes
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Grant:
    transfer_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Commit:
    transfer_id: str
    generation: int
    first_token: int


@dataclass(frozen=True, slots=True)
class CommitAck:
    transfer_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Nack:
    transfer_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    transfer_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class AbortAck:
    transfer_id: str
    generation: int


FromPrefill = Hello | Rendezvous | Offer | Commit | Abort
FromDecode = Welcome | Rendezvous | Grant | CommitAck | Nack | AbortAck
