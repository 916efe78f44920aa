"""Messages between a worker and its host, as JSON over a pair of sockets.

Worker -> host: `Start` once, then commands: `Add`, `Abort`, `Insert`, `Adopt`, `PinPrefix`, `Unpin`, `Budget` and
`Ping`. The end of the connection ends the host.
Host -> worker: `Ready` or `Failed` once, then a `Stepped` for each step, with `Allocated` and `LayerDone` before it;
`Pinned`; `Failed` for a sequence; `Pong`; and `Lost` before the host ends.
"""

from __future__ import annotations

import fcntl
import json
import select
import socket
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple, get_args

from baton.sampling import EarlyStopping, SamplingParams
from baton.structure import StructuredOutputs

_LENGTH = struct.Struct("<I")
_DEFAULTS = SamplingParams()


class Start(NamedTuple):
    """Arguments and settings from which the host builds the engine."""

    arguments: dict[str, Any]
    """Arguments of vLLM's `EngineArgs`."""
    eos_token_ids: list[int]
    cpu_arguments: dict[str, Any]
    """Arguments that replace those in `arguments` if vLLM computes on CPUs."""
    pins_by_request: bool = False
    """True: the host always pins a prefix by a request; see `HostedVllm.pin_prefix`."""
    exchange_bytes: int = 0
    """Bytes of GPU memory to leave for the worker if workers with GPUs exchange KV; 0: they do not. Workers on CPUs
    ignore it."""


class Group(NamedTuple):
    """Layers of vLLM's KV cache with one block table."""

    kind: str
    """full, window, state or other; see `admission.blocks_of`."""
    num_layers: int
    block_size: int
    """Tokens per block."""
    window: int
    """Tokens of a window; 0: none."""


class GpuMemory(NamedTuple):
    """Memory of a GPU with a KV cache; see `engine.gpu_memory`."""

    uuid: str
    """UUID of the GPU."""
    offset: int
    """Offset of the cache in the memory, in bytes."""
    handle: str
    """Legacy handle, hexadecimal; empty: the memory consists of VMM allocations."""
    sizes: list[int]
    """Bytes of each VMM allocation. Their descriptors come with `Ready`, in this order."""


class KvMemory(NamedTuple):
    """vLLM's KV cache in memory that the worker maps: `[layer][block][row]`, without gaps."""

    num_layers: int
    num_blocks: int
    """Number of blocks, including the null block."""
    row_numel: int
    """Elements of one block of one layer, in an order that vLLM's attention defines."""
    dtype: str
    probe: list[int]
    """Blocks of a prompt that the host has computed. The worker checks that only they contain KV."""
    gpu: GpuMemory | None = None
    """GPU memory with the cache; None: the cache is in main memory."""


class Ready(NamedTuple):
    """The engine as vLLM has built it."""

    version: str
    groups: list[Group]
    num_blocks: int
    """Number of blocks that sequences can use. All groups take their blocks from this one pool."""
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    device: str
    """Name of the GPU; empty: vLLM computes on CPUs."""
    dtype: str
    kv_dtype: str
    attention: str
    quantization: str
    caches_prefixes: bool
    memory: KvMemory | None
    """Description of the shared KV cache; None: it is not shared, so this worker exchanges no KV."""
    tag: str
    """Name of the order of values within a row. Rows may be copied between workers with the same name."""
    why_not_shared: str = ""
    """Reason why `memory` is None; empty: it is not, or the host did not try to share it."""
    pins_by_request: bool = False
    """True: `PinPrefix` must contain the tokens."""


class Add(NamedTuple):
    """A sequence to compute."""

    key: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_new_tokens: int
    """Maximum number of tokens to generate."""
    stop_token_ids: list[int]
    choice_index: int
    salt: str
    """Seed of its block keys, hexadecimal: vLLM shares no block between different salts."""
    sampling: dict[str, Any]
    purpose: str
    """Value of its `Purpose`."""


class Abort(NamedTuple):
    """End a sequence. Its blocks are free before the next step, also those kept for other workers."""

    key: int


class Insert(NamedTuple):
    """Continue a RECEIVE sequence, whose KV has arrived."""

    key: int
    first_token: int
    """First token of the output, if another worker has drawn it; -1: this worker draws it."""
    num_tokens: int
    """Number of leading tokens whose KV has arrived; vLLM computes the others."""


class Adopt(NamedTuple):
    """Add the KV of the first `num_tokens` tokens of a RECEIVE sequence, which has arrived, to the prefix cache."""

    key: int
    num_tokens: int


class PinPrefix(NamedTuple):
    """Keep a cached prefix until `Unpin`."""

    pin_id: int
    names: list[str]
    """vLLM's hashes of its blocks."""
    num_free: int
    """Maximum number of blocks to pin that no sequence uses."""
    token_ids: list[int]
    """Tokens of the blocks, if `Ready.pins_by_request`; otherwise empty."""
    salt: str


class Pinned(NamedTuple):
    """Answer to `PinPrefix`."""

    pin_id: int
    block_ids: list[int]
    """Pinned blocks: the first ones of the prefix, up to the first that is not cached."""
    num_taken: int
    """Number of these blocks that no sequence used before."""


class Unpin(NamedTuple):
    """Release a pin."""

    pin_id: int


class Allocated(NamedTuple):
    """Report all blocks of a PREFILL or RECEIVE sequence."""

    key: int
    block_ids: list[int]
    num_cached_tokens: int
    """Number of tokens found in the prefix cache; -1: as reported before."""


class LayerDone(NamedTuple):
    """Report that the KV of the first layers is complete, while the step still computes the others."""

    num_layers: int
    ends: list[tuple[int, int]]
    """PREFILL sequences, each with the number of leading tokens whose KV is complete in these layers."""


class Budget(NamedTuple):
    """Maximum number of prompt tokens in each step from now on."""

    num_tokens: int


class Ping(NamedTuple):
    """Ask the host for a `Pong`, which it sends between two steps."""


class Pong(NamedTuple):
    """See `Ping`."""


class Progress(NamedTuple):
    """Results of a step for one sequence."""

    key: int
    token_ids: list[int]
    finish: str
    """stop or length; empty: it continues."""
    num_cached_tokens: int
    """Tokens that vLLM found in its prefix cache when it admitted the sequence; -1: as reported before."""
    logprobs: list[list[tuple[int, float]]]
    """Each new token and after it the likeliest ones, as pairs of an id and a log probability; empty: not requested."""
    prompt_logprobs: list[list[tuple[int, float]]]
    """Pairs as in `logprobs` for each prompt token except the first; sent with the first new token."""


class StoredBlock(NamedTuple):
    """A block in vLLM's prefix cache."""

    name: str
    """vLLM's hash, hexadecimal."""
    before: str
    """Hash of the previous block; empty: this is the first block of a prompt."""
    token_ids: list[int]
    salt: str
    """Salt of the sequence if this is a first block; otherwise empty."""


class Counts(NamedTuple):
    """State of vLLM's scheduler after a step."""

    num_free: int
    """Number of blocks that no sequence uses, cached or not."""
    num_uncomputed: int
    """Number of known tokens of vLLM's sequences that are not computed."""
    num_preempted: int
    """Preemptions since the start."""
    num_named: int
    """Number of hashes in the prefix cache; -1: unknown, because several groups of layers share the hashes."""


class Stepped(NamedTuple):
    """A step has ended."""

    took_s: float
    size: tuple[int, int, int, int]
    """New tokens, pairs, decoding sequences and their context; see `StepSize`."""
    progress: list[Progress]
    stored: list[StoredBlock]
    removed: list[str]
    """Hashes that are no longer in the prefix cache."""
    ends: list[tuple[int, int]]
    """PREFILL sequences, each with the number of its computed tokens."""
    counts: Counts


class Failed(NamedTuple):
    """The engine could not be built, or one sequence has failed and the others continue."""

    key: int
    """Key of the sequence; -1: the engine."""
    reason: str


class Lost(NamedTuple):
    """A step has failed; the host ends."""

    reason: str


Command = Add | Abort | Insert | Adopt | PinPrefix | Unpin | Budget | Ping
Message = Start | Ready | Command | Stepped | Allocated | LayerDone | Pinned | Pong | Failed | Lost
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}


def encoded(message: Message) -> bytes:
    """Return a message as it is sent: its length in 4 bytes, then JSON."""
    body = json.dumps([type(message).__name__, *message], separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def decoded(body: bytes) -> Message:
    """Return the message that a body encodes. Raise ValueError if it encodes none."""
    try:
        return _message_of(*json.loads(body))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{body[:SHOWN_BYTES]!r} is not a message ({error!r})") from error


def _message_of(kind: str, *values: Any) -> Message:
    message: Message = _KINDS[kind](*values)
    match message:
        case Ready():
            return message._replace(groups=[Group(*each) for each in message.groups], memory=_memory_of(message.memory))
        case Stepped():
            return message._replace(
                progress=[Progress(*each) for each in message.progress],
                stored=[StoredBlock(*each) for each in message.stored],
                counts=Counts(*message.counts),
            )
    return message


def _memory_of(values: Sequence[Any] | None) -> KvMemory | None:
    if values is None:
        return None
    memory = KvMemory(*values)
    return memory if memory.gpu is None else memory._replace(gpu=GpuMemory(*memory.gpu))


def length_of(head: bytes) -> int:
    """Return the length of the body that follows this head."""
    (length,) = _LENGTH.unpack(head)
    return int(length)


HEAD_BYTES = _LENGTH.size
SHOWN_BYTES = 80
"""Maximum number of bytes of a body that an error shows."""


FAILURES = "failures"
"""File in the host's folder. In each step the sampler appends the sequences for which it has no token, as JSON lines of
key and reason; the host reads them after the step. A file has room for any number, and the sampler may run in the
host's own thread, which must not wait for itself."""
MAX_DESCRIPTORS = 253
"""Maximum number of descriptors that Linux sends in one message."""
READ_S = 0.0005
"""Seconds after which `await_read` checks again."""
_INT = struct.Struct("i")
_ROOM = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT.size)


class Channel:
    """Blocking end of the connection. Only one thread may use it.

    Attributes:
        descriptors: file descriptors that have arrived, in order. The owner of the channel closes them.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.descriptors: list[int] = []
        self._connection = connection
        self._received = bytearray()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with file descriptors if there are any. Raise OSError if the other end has closed."""
        body = encoded(message)
        sent = socket.send_fds(self._connection, (body,), descriptors) if descriptors else 0
        self._connection.sendall(body[sent:])

    def await_read(self) -> None:
        """Wait until the other end has read what it was sent, or has gone."""
        while _INT.unpack(fcntl.ioctl(self._connection, termios.TIOCOUTQ, bytes(_INT.size))) != (0,):
            time.sleep(READ_S)

    def receive(self, timeout_s: float | None = None) -> Iterator[Message]:
        """Yield the messages that have arrived. If there is none, wait for one.

        Args:
            timeout_s: maximum time to wait for the first one; None: no limit.

        Raises:
            EOFError: the other end has closed the connection.
        """
        self._fill(timeout_s)
        while (message := self._taken()) is not None:
            yield message
            self._fill(0)

    def _fill(self, timeout_s: float | None) -> None:
        while not self._is_whole:
            if not select.select((self._connection,), (), (), timeout_s)[0]:
                return
            # Not `socket.recv_fds`: it ignores its flags, so child processes would inherit the descriptors.
            chunk, extras, *_ = self._connection.recvmsg(1 << 20, _ROOM, socket.MSG_CMSG_CLOEXEC)
            for level, kind, packed in extras:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self.descriptors += struct.unpack(f"{len(packed) // _INT.size}i", packed)
            if not chunk:
                raise EOFError
            self._received += chunk

    @property
    def _is_whole(self) -> bool:
        received = self._received
        return len(received) >= HEAD_BYTES and len(received) >= HEAD_BYTES + length_of(bytes(received[:HEAD_BYTES]))

    def _taken(self) -> Message | None:
        if not self._is_whole:
            return None
        end = HEAD_BYTES + length_of(bytes(self._received[:HEAD_BYTES]))
        body = bytes(self._received[HEAD_BYTES:end])
        del self._received[:end]
        return decoded(body)


def values_of(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from their defaults, in types of JSON."""
    given = {each.name: getattr(params, each.name) for each in fields(params)}
    changed = {name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}
    if params.structured_outputs is not None:
        changed["structured_outputs"] = asdict(params.structured_outputs)
    return changed


def params_of(values: dict[str, Any]) -> SamplingParams:
    """Return the parameters that `values_of` has described."""
    given = {name: _as_tuple(value) for name, value in values.items()}
    if structure := values.get("structured_outputs"):
        structure = {name: _as_tuple(value) for name, value in structure.items()}
        given["structured_outputs"] = StructuredOutputs(**structure)
    if early := values.get("early_stopping"):
        given["early_stopping"] = EarlyStopping(early)
    return SamplingParams(**given)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
