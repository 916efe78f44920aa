"""Messages between processes, as plain values. `baton.wire` converts them to protobuf and back.

Router -> worker: `PrefillRequest`, answered by `FirstToken` and `Transferred`; `DecodeRequest`, answered by `Ticket`
and `NewTokens`; `FetchRequest`, answered by `Fetched`; all in one stream of `StartCall` and `CancelCall` one way and of
`Event` the other way. Worker <-> worker: the messages of a KV connection, `FromSender` and `FromReceiver`, and `Pull`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from baton.blocks import HASH_BLOCK, block_keys, seed_with_adapter
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
class Adapter:
    """A LoRA adapter of the served model, as it was registered."""

    name: str
    """Model name under which clients request it."""
    path: str
    """Folder of the adapter, which every worker can read."""
    digest: str
    """Digest of its content, hexadecimal. It names the adapter in block keys: a folder with new weights is another
    adapter."""
    rank: int
    """Largest rank of its matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image in a prompt. It has `num_tokens` tokens, of which the first is at position `offset`."""

    digest: bytes
    """Digest of the image's bytes; `baton.blocks.KEY_BYTES` long."""
    offset: int
    num_tokens: int
    grid: tuple[int, ...]
    """Numbers of patches in time, height and width, from which positions follow; the model's processor defines them."""

    @property
    def end(self) -> int:
        """One past the position of its last token."""
        return self.offset + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenImage:
    """A worker's reply about an image, with the tokens that replace its placeholder in a rendered chat."""

    digest: bytes
    """Digest of the image's bytes; `baton.blocks.KEY_BYTES` long."""
    grid: tuple[int, ...]
    """See `PlacedImage.grid`."""
    token_ids: tuple[int, ...]
    """Placeholder tokens of its embeddings, with the tokens that the model's processor writes between them."""

    def placed(self, offset: int) -> PlacedImage:
        """Return its place in a prompt that has its tokens from position `offset` on."""
        return PlacedImage(digest=self.digest, offset=offset, num_tokens=len(self.token_ids), grid=self.grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One choice of one request, as the engine needs it."""

    request_id: str
    choice_index: int
    token_ids: tuple[int, ...]
    """Prompt, followed by the tokens already generated if a choice is resumed."""
    num_prompt_tokens: int
    sampling: SamplingParams
    """The router's parameters: `seed` is set, and so is `max_tokens`, except for a prefix that is only received."""
    cache_seed: bytes
    attempt: int = 0
    """Counter that rises each time the choice is placed again."""
    priority: int = 0
    """Higher runs earlier."""
    ttft_s: float = math.inf
    """Time within which the first token is due, from the worker's receipt of this message."""
    itl_s: float = math.inf
    """Objective: mean time between tokens."""
    num_expected_tokens: int = 0
    """Expected tokens of the whole choice, for which a worker reserves memory; 0: the worker's setting decides."""
    hypotheses: Hypotheses = NO_HYPOTHESES
    """State from which a beam search continues; the tokens then end with the common prefix of its running beams."""
    adapter: Adapter | None = None
    """The adapter that answers; None: the model itself."""
    images: tuple[PlacedImage, ...] = ()
    """Images of its prompt, in the order of their offsets; they do not overlap."""

    @property
    def key_seed(self) -> bytes:
        """Seed of its key chain: the cache scope's, and the adapter's if it has one."""
        return self.cache_seed if self.adapter is None else seed_with_adapter(self.cache_seed, self.adapter.digest)

    def block_keys(
        self,
        token_ids: Sequence[int],
        known: Sequence[bytes] = (),
        *,
        end: int | None = None,
        block_size: int = HASH_BLOCK,
    ) -> list[bytes]:
        """Return the keys of the sequence's full blocks after the known ones. Every key of a sequence is made here.

        Args:
            token_ids: the sequence's tokens from its begin: its own, or with more of its answer.
            known: keys of its first blocks, of the same size.
            end: number of tokens whose blocks are named; None: all.
        """
        begin = len(known) * block_size
        given = token_ids[begin:end]
        seed = known[-1] if known else self.key_seed
        if not self.images:
            return block_keys(seed, given, block_size)
        return block_keys(seed, given, block_size, self._images_by_block(begin, begin + len(given)))

    def _images_by_block(self, begin: int, end: int) -> dict[int, bytes]:
        """Return what names the images in each hash block between two positions, by the block's index among these."""
        found: dict[int, bytes] = {}
        for image in self.images:
            name = image.digest + array("I", (image.offset, image.num_tokens, *image.grid)).tobytes()
            first, last = max(begin, image.offset), min(end, image.end)
            for block in range((first - begin) // HASH_BLOCK, -(-(last - begin) // HASH_BLOCK)):
                found[block] = found.get(block, b"") + name
        return found

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of the whole choice, including those already generated; 0 for a mere prefix."""
        return self.sampling.max_tokens or 0

    @property
    def seed(self) -> int:
        """Seed of its random numbers, which the router has set."""
        assert self.sampling.seed is not None
        return self.sampling.seed

    @property
    def sequence_id(self) -> str:
        """Name in logs, with a digest of the cache scope. It is not unique: clients choose request ids."""
        scope = blake2b(self.cache_seed, digest_size=4).hexdigest()
        return f"{scope}/{self.request_id}/{self.choice_index}/{self.attempt}"

    def prefix(self, num_tokens: int) -> SequenceSpec:
        """Return the sequence's first tokens alone, whose KV is received: nothing of it is computed or drawn."""
        sampling = replace(self.sampling, max_tokens=None)
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            num_prompt_tokens=num_tokens,
            sampling=sampling,
            images=tuple(image for image in self.images if image.offset < num_tokens),
        )

    @property
    def is_continued(self) -> bool:
        """True if the client already has some of the tokens, from another worker."""
        return len(self.token_ids) > self.num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """A worker that presumably holds a longer prefix of the prompt, from which it can be pulled."""

    worker_id: str
    address: str
    """host:port of its KvControl service."""
    num_tokens: int
    """Number of leading prompt tokens that it presumably holds."""
    incarnation: str = ""
    """The worker's incarnation, to which the proof of a call is bound; empty: its release does not announce it."""
    permit: bytes = b""
    """The router's signed permit to pull them (`baton.trust.permits`); empty if the cluster has no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A worker's reservation of blocks for one transfer into its cache."""

    transfer_id: str
    """Ends in random characters. Any process that knows it may send, so only the chosen sender receives it."""
    generation: int
    """Unique per reservation in the life of the receiving process."""
    decode_worker_id: str
    """The receiving worker's id."""
    incarnation: str
    """The receiving worker's incarnation: one per process start."""
    kv_address: str
    num_tokens: int
    """Number of tokens whose KV is transferred: all, or all but the last one, which the receiver computes."""
    skip_tokens: int
    """Number of leading tokens whose blocks the receiver already holds in the layer groups without a window; a multiple
    of its block size."""
    wire_compat: str
    layout: KvLayout
    force_first_token: bool = False
    """True if the receiver needs the first token, since it cannot draw it from the requested KV."""
    begins: tuple[int, ...] = ()
    """First token whose KV is transferred, by layer group; empty: `skip_tokens` for all groups.

    Each is a multiple of the receiver's block size in its group.
    """


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
    """Cached tokens that were not in the cache when the request arrived."""
    pull_s: float = 0.0
    """Duration of their pull; a part of `queue_s`."""
    room_s: float = 0.0
    """The part of `queue_s` in which the worker had no capacity to start the next sequence."""
    prompt_scores: TokenScores = NO_SCORES
    """Log probabilities of each prompt token but the first, if the request asks for them."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prompt is computed; the transfer of its KV continues."""

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
    """The part of it after the first token, which no computation hid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """Tokens that a decode worker has drawn since its last message."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    report: PrefillReport | None = None
    """Set in the first message of a worker that computed the prompt itself."""
    scores: TokenScores = NO_SCORES
    """Log probabilities of the tokens, if the request asks for them."""
    beams: tuple[Beam, ...] = ()
    """All sequences of a beam search, best first, in its last message, which has no tokens."""
    num_searched: int = 0
    """Number of tokens that a search's beams have drawn since the last message."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Request to compute a prompt and transfer its KV."""

    sequence: SequenceSpec
    ticket: Ticket | None
    """Destination of the blocks; None: they stay on this worker."""
    source: PrefixSource | None = None
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Encoded images of the prompt that the worker presumably does not hold."""


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """Request to generate a choice."""

    sequence: SequenceSpec
    await_kv: bool
    """True if another worker computes the prompt."""
    source: PrefixSource | None = None
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Encoded images of the prompt that the worker presumably does not hold; empty if it awaits KV."""


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Request to pull a prefix of the sequence, which will be placed here, into the cache."""

    sequence: SequenceSpec
    source: PrefixSource


@dataclass(frozen=True, slots=True)
class Fetched:
    """The pull of a prefix has ended."""

    num_tokens: int
    """Number of pulled tokens; 0 if the pull failed for any reason."""


@dataclass(frozen=True, slots=True)
class Migrate:
    """The worker leaves its role: the choice should be migrated. It is served here until the call is cancelled."""

    hypotheses: Hypotheses = NO_HYPOTHESES
    """State of a beam search; empty: the choice is not a search, or its search is served here to its end."""


# The stream between a router and a worker. A call is one choice on that worker; its id belongs to that stream.


@dataclass(frozen=True, slots=True)
class StartCall:
    """Start of a call."""

    call_id: int
    request: PrefillRequest | DecodeRequest | FetchRequest | BatonError | None
    """An error: the reason why the worker cannot even read it. None: a kind that this version does not know."""
    trace: Mapping[str, str]
    """W3C trace context, by header."""


@dataclass(frozen=True, slots=True)
class CancelCall:
    """The router leaves a call: everything it holds on the worker is freed."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The call's last event: an error of Baton's tree."""

    kind: str
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call's last event: the worker sends nothing more and holds nothing for it."""


Decoding = Ticket | NewTokens | Migrate
"""Responses to the call of a choice that decodes on a worker."""
Event = FirstToken | Transferred | Ticket | NewTokens | Fetched | Migrate | Failed | CallEnded


# A KV connection. Every message about a transfer names its generation, so that one about a past reservation is dropped.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The sender's first message: its identity and capabilities."""

    protocol_version: int
    worker_id: str
    incarnation: str
    wire_compat: str
    transports: tuple[str, ...]
    layout: KvLayout
    rank: int
    """The sending rank."""
    peer_rank: int
    """The addressed receiving rank."""
    host_id: str
    """Equal if two processes can share memory."""
    gpu_id: str = ""
    """Equal if both ranks' caches are on one GPU; empty: on none, or unknown."""
    gpu_uuid: str = ""
    """UUID of the GPU of the rank's cache in the driver; empty: it is on none."""
    plaintext_transports: tuple[str, ...] = ()  # transports that may send KV unencrypted despite certificates


@dataclass(frozen=True, slots=True)
class Welcome:
    """The receiver's answer to `Hello`: the transport that it chose."""

    incarnation: str
    transport: str
    pair_epoch: int


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """The receiver's last message: the reason why it ended the session.

    Without it, the sender has lost its receiver.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class TransportReady:
    """The receiver's end of the transport is open."""


@dataclass(frozen=True, slots=True)
class Ping:
    """This side is alive. From the sender it renews the leases of all transfers that it offered on the session."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A value with which the two ends of a transport connect."""

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
    """Number of offered leading tokens: the ticket's, or fewer if a prefix is pulled."""
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
    """The receiver rejects or aborts the transfer."""

    transfer_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender aborts the transfer."""

    transfer_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class AbortAck:
    """The receiver has ended the transfer, and frees its blocks."""

    transfer_id: str
    generation: int


FromSender = Hello | Rendezvous | Offer | Commit | Abort | Ping
FromReceiver = Welcome | Rendezvous | TransportReady | Grant | CommitAck | Nack | AbortAck | Ping | SessionFailed


@dataclass(frozen=True, slots=True)
class Pull:
    """Request to send the cached part of a prefix to the ticket's worker."""

    ticket: Ticket
    block_keys: tuple[bytes, ...]
    """Chained keys of the prefix, one per 16 tokens."""
    permit: bytes = b""
    """The router's permit from the `PrefixSource`."""
