"""What processes say to each other, as plain values. `baton.wire` turns them into protobuf and back.

Router -> worker: `PrefillRequest`, answered by `FirstToken` and `Transferred`; `DecodeRequest`, answered by `Ticket`
and `NewTokens`; `FetchRequest`, answered by `Fetched`; all in one stream of `StartCall` and `CancelCall` one way and of
`Event` the other way. Worker <-> worker: those of a KV connection, `FromSender` and `FromReceiver`, and `Pull`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from baton.errors import BatonError
from baton.hypotheses import NO_HYPOTHESES, Beam, Hypotheses
from baton.kv_layout import KvLayout
from baton.sampling import FinishReason, SamplingParams
from baton.scores import NO_SCORES, TokenScores

ROUTERS_SAMPLING = frozenset(
    {"stop", "n", "best_of", "bad_words", "dry_sequence_breakers", "include_stop_str_in_output", "skip_special_tokens"}
)
"""Fields of `SamplingParams` that stay with the router: a worker knows neither text nor the other choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One choice of one request, as the engine needs it."""

    request_id: str
    choice_index: int
    token_ids: tuple[int, ...]
    """Prompt, followed by the tokens already generated when a choice is resumed."""
    num_prompt_tokens: int
    sampling: SamplingParams
    """The router's choice: `max_tokens` and `seed` are set, but no `max_tokens` of a prefix that is only received."""
    cache_seed: bytes
    attempt: int = 0
    """One more each time the choice is placed again."""
    priority: int = 0
    """Higher runs earlier."""
    ttft_s: float = math.inf
    """Time within which the first token is due, from when the worker has received this."""
    itl_s: float = math.inf
    """Objective: mean time between tokens."""
    num_expected_tokens: int = 0
    """Expected tokens of the whole answer, for which a worker reserves room; 0: as many as its own settings say."""
    hypotheses: Hypotheses = NO_HYPOTHESES
    """Where a beam search goes on; the tokens then end with those that all its running beams begin with."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the whole answer, those already generated included; 0 of a prefix that is only received."""
        return self.sampling.max_tokens or 0

    @property
    def seed(self) -> int:
        """The seed of its random numbers, which the router has settled."""
        assert self.sampling.seed is not None
        return self.sampling.seed

    @property
    def sequence_id(self) -> str:
        """Name in logs, with a digest of the cache scope. It is not unique: clients choose request ids."""
        scope = blake2b(self.cache_seed, digest_size=4).hexdigest()
        return f"{scope}/{self.request_id}/{self.choice_index}/{self.attempt}"

    def prefix(self, num_tokens: int) -> SequenceSpec:
        """The sequence's first tokens alone, whose KV is received: nothing of it is computed or drawn."""
        sampling = replace(self.sampling, max_tokens=None)
        return replace(self, token_ids=self.token_ids[:num_tokens], num_prompt_tokens=num_tokens, sampling=sampling)

    @property
    def is_continued(self) -> bool:
        """Whether the client has some of the answer already, from another worker."""
        return len(self.token_ids) > self.num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """A worker that is believed to hold a longer prefix of the prompt, from which it can be pulled."""

    worker_id: str
    address: str
    """host:port of its KvControl service."""
    num_tokens: int
    """Leading prompt tokens it is believed to hold."""
    incarnation: str = ""
    """The worker's incarnation, to which the proof of a call is bound; empty: its release does not announce it."""
    permit: bytes = b""
    """The router's signed permit to pull them (`baton.trust.permits`); empty where the cluster has no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A worker's promise of blocks for one transfer into its cache."""

    transfer_id: str
    """Ends in random characters: who knows it may send, so only the sender that the router has chosen is given it."""
    generation: int
    """Unique per reservation in the life of the receiving process."""
    decode_worker_id: str
    """The receiving worker's id."""
    incarnation: str
    """The receiving worker's incarnation: one per process start."""
    kv_address: str
    num_tokens: int
    """Tokens whose KV is transferred: all of a sequence, or all but the last one, which the receiver computes."""
    skip_tokens: int
    """Leading tokens whose blocks the receiver already holds; a multiple of its block size."""
    wire_compat: str
    layout: KvLayout
    force_first_token: bool = False
    """Whether the receiver has to be given the first token, since it cannot draw it from the KV that it asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReport:
    """A worker's report on a prompt that it computed, sent with the first token."""

    num_cached_tokens: int = 0
    """Prompt tokens found in the worker's cache, pulled ones included."""
    queue_s: float = 0.0
    """Time from the request's arrival to the first step that computed a part of it."""
    prefill_s: float = 0.0
    """Time from that step to the first token."""
    num_pulled_tokens: int = 0
    """Cached tokens that were not there when the request came."""
    pull_s: float = 0.0
    """Time that pulling them took; a part of `queue_s`."""
    room_s: float = 0.0
    """The part of `queue_s` in which the worker had no room to begin the next sequence."""
    prompt_scores: TokenScores = NO_SCORES
    """Log probabilities of each prompt token but the first, where the request asks for them."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prompt is computed; the KV transfer of its KV goes on."""

    token_id: int | None
    """None: the worker's engine draws no token with a prompt, and the decode worker draws it."""
    finish_reason: FinishReason | None
    report: PrefillReport
    scores: TokenScores = NO_SCORES


@dataclass(frozen=True, slots=True)
class Transferred:
    """The decode worker has acknowledged the KV."""

    num_bytes: int
    num_chunks: int
    transfer_s: float
    """Time from the first chunk, or from the last token if that came first, to the acknowledged commit."""
    exposed_s: float
    """The part of it that came after the first token: what no computing hid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """Tokens that a decode worker has drawn since its last message."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    report: PrefillReport | None = None
    """Set in the first message of a worker that computed the prompt itself."""
    scores: TokenScores = NO_SCORES
    """Log probabilities of the tokens, where the request asks for them."""
    beams: tuple[Beam, ...] = ()
    """All answers of a beam search, best first, in its last message, which has no tokens of its own."""
    num_searched: int = 0
    """Tokens that a search's beams have drawn since the last message."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """The worker computes a prompt and hands its KV over."""

    sequence: SequenceSpec
    ticket: Ticket | None
    """Where the blocks go; None: they stay."""
    source: PrefixSource | None = None


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """The worker generates an answer."""

    sequence: SequenceSpec
    await_kv: bool
    """Whether another worker computes the prompt."""
    source: PrefixSource | None = None


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """The worker pulls a prefix of the sequence, which will come here, into its cache."""

    sequence: SequenceSpec
    source: PrefixSource


@dataclass(frozen=True, slots=True)
class Fetched:
    """The pull of a prefix is over."""

    num_tokens: int
    """Tokens that came; 0: none did, for whatever reason."""


@dataclass(frozen=True, slots=True)
class Migrate:
    """The worker leaves its role: the choice should go on elsewhere. It is served here until the call is cancelled."""

    hypotheses: Hypotheses = NO_HYPOTHESES
    """Where a beam search was by then; empty: the choice is none, or its search is served here to its end."""


# The stream of a router and a worker. A call is one choice on that worker; its id is one of that stream.


@dataclass(frozen=True, slots=True)
class StartCall:
    """A call begins."""

    call_id: int
    request: PrefillRequest | DecodeRequest | FetchRequest | BatonError | None
    """An error: why the worker does not even read it. None: a kind that this version does not know."""
    trace: Mapping[str, str]
    """W3C trace context, by header."""


@dataclass(frozen=True, slots=True)
class CancelCall:
    """A call is left: whatever it holds on the worker is freed."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The call's last event: an error of Baton's tree."""

    kind: str
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call's last event: nothing more comes, and nothing is held any more."""


Decoding = Ticket | NewTokens | Migrate
"""The answers to the call of a choice that decodes on a worker."""
Event = FirstToken | Transferred | Ticket | NewTokens | Fetched | Migrate | Failed | CallEnded


# A KV connection. Every message about a transfer names its generation, so that one about a past reservation is dropped.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The sender's first message: who it is, and what it can send."""

    protocol_version: int
    worker_id: str
    incarnation: str
    wire_compat: str
    links: tuple[str, ...]
    layout: KvLayout
    rank: int
    """The sending rank."""
    peer_rank: int
    """The receiving rank that is meant."""
    host_id: str
    """Equal where two processes can share memory."""
    gpu_id: str = ""
    """Equal where both ranks' caches are on one GPU; empty: on none, or not known."""
    gpu_uuid: str = ""
    """The driver's name for the GPU of the rank's cache; empty: it is on none."""
    plain_links: tuple[str, ...] = ()  # transports that may send KV unencrypted despite certificates


@dataclass(frozen=True, slots=True)
class Welcome:
    """The receiver's answer to `Hello`: the transport that it chose."""

    incarnation: str
    link: str
    pair_epoch: int


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """The receiver's last word: why the session is over. A session that ends without it has lost its receiver."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkReady:
    """The receiver's end of the transport is open."""


@dataclass(frozen=True, slots=True)
class Ping:
    """This side lives. From the sender it renews the leases of all transfers that it offered on the session."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A value by which the two ends of a transport find each other."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The sender is ready to send a transfer."""

    transfer_id: str
    generation: int
    plan_digest: bytes
    num_chunks: int
    wire_dtype: str
    num_tokens: int
    """Leading tokens that are offered: the ticket's, or fewer where a prefix is pulled."""
    chunk_bytes: int
    """Largest payload of a chunk."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The receiver expects the transfer's chunks."""

    transfer_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Commit:
    """All chunks have been sent."""

    transfer_id: str
    generation: int
    first_token: int | None
    """The token from which the receiver continues; None for a pulled prefix, and if the receiver draws it itself."""


@dataclass(frozen=True, slots=True)
class CommitAck:
    """All chunks have arrived and are written."""

    transfer_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Nack:
    """The receiver refuses the transfer, or gives it up."""

    transfer_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender gives the transfer up."""

    transfer_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class AbortAck:
    """The receiver expects nothing more of the transfer, and frees its blocks."""

    transfer_id: str
    generation: int


FromSender = Hello | Rendezvous | Offer | Commit | Abort | Ping
FromReceiver = Welcome | Rendezvous | LinkReady | Grant | CommitAck | Nack | AbortAck | Ping | SessionFailed


@dataclass(frozen=True, slots=True)
class Pull:
    """Asks a worker to send what it holds of a prefix to the ticket's worker."""

    ticket: Ticket
    block_keys: tuple[bytes, ...]
    """Chained keys of the prefix, one for each 16 tokens."""
    permit: bytes = b""
    """What the router gave with the `PrefixSource`."""
