"""The interface that a worker uses to drive an engine: services, KV endpoint and member need nothing else of it.

`EngineLoop` implements it for Baton's own engine. Another engine may run in another process, so calls that may need a
round trip are awaited, and they return values, never the engine's own objects. The test suite has a second
implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, Protocol

from baton.adapters import AdapterFacts
from baton.cluster import Computes
from baton.errors import BatonError
from baton.hypotheses import Hypotheses
from baton.messages import SeenImage, SequenceSpec
from engine.core.outputs import EngineLoad, OnEngineEvent, OnProgress, Output, Pin, ignore_event
from engine.core.runner import KVSpec
from engine.core.sequence import Purpose


class ServedSequence(Protocol):
    """A sequence in an engine, valid while its context is entered."""

    async def next(self) -> Output:
        """Return the next output, once there is one.

        The first output of a RECEIVE sequence is `Reserved`, that of a PREFILL sequence `Admitted`. `Generated` follows
        until one has a finish reason. `Preempted` may come at any time.

        Raises:
            WorkerFailed: the step that would have computed it failed, or, as DeviceLost, all steps do from now on.
            ImagesMissing: a RECEIVE sequence has to be computed here after all, and its images were not received.
            BatonError: the sequence was handed back (`ServingEngine.hand_back`).
        """
        ...

    def take_ready(self) -> list[Output]:
        """Return the outputs that are ready, so that a slow reader gets several at once."""
        ...

    async def pin(self) -> Pin:
        """Pin all blocks of the sequence, including later ones, until `ServingEngine.unpin`."""
        ...

    def watch(self, on_progress: OnProgress) -> None:
        """Report the progress of the sequence's KV.

        A report stays true as long as the blocks are held or pinned. The first report comes immediately and covers what
        is already computed, in all layers. Then each step that computes the sequence yields at least one report, when
        it ends and all layers are there. If the engine can, it also reports each layer, from its own thread. A step
        starts with one layer and more tokens than the step before; this does not revoke earlier reports, and neither
        does the final report of a step that comes after the next one has started.

        `on_progress` must be quick, because a step waits for it; it must not raise, and must be safe to call in any
        thread. It is not called after the sequence's context has been left, except for a call in progress at that
        moment.
        """
        ...

    def insert(self, first_token: int | None, num_tokens: int | None = None) -> None:
        """Start to decode a RECEIVE sequence whose KV has arrived.

        If the first token already ends the sequence, `Generated` follows without tokens, with the finish reason.

        Args:
            first_token: the next token, which the engine must use; None: the engine samples it.
            num_tokens: number of leading tokens whose KV arrived, if not all.
        """
        ...

    def adopt(self, num_tokens: int) -> None:
        """Leave the KV of the first `num_tokens` tokens, which have arrived, in the prefix cache."""
        ...


class ServingEngine(Protocol):
    """An engine as its worker uses it."""

    @property
    def name(self) -> str:
        """Name of the engine, as shown in the cluster's state."""
        ...

    @property
    def sampler(self) -> str:
        """Name of its sampler (see `Runner`): a sampled response migrates only between engines with the same name."""
        ...

    @property
    def computes(self) -> Computes:
        """Hardware and implementations that it computes with, except for those that copy KV."""
        ...

    @property
    def spec(self) -> KVSpec:
        """Shape of each rank's KV cache."""
        ...

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Number of KV blocks of each layer group."""
        ...

    @property
    def caches(self) -> Sequence[Any]:
        """Every rank's KV cache, in a type that the KV transfer supports; block ids mean the same in all of them."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; token ids must be less."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens."""
        ...

    @property
    def max_step_tokens(self) -> int:
        """Maximum number of tokens that one step computes."""
        ...

    @property
    def max_adapters(self) -> int:
        """Number of adapters that it holds at a time; 0: it refuses requests for adapters."""
        ...

    @property
    def self_check(self) -> str:
        """`ok`, or a description of an error in the engine's own accounting."""
        ...

    @property
    def takes_images(self) -> bool:
        """True if its model answers prompts with images here."""
        ...

    @property
    def image_placeholder(self) -> int | None:
        """Id of the token that stands once per image in the text of a chat; None: it takes no images."""
        ...

    async def look(self, images: Sequence[bytes], cache_seed: bytes) -> tuple[SeenImage, ...]:
        """Decode images and keep them for sequences to come, as long as there is room.

        Args:
            images: PNG, JPEG, WEBP or GIF files.
            cache_seed: that of their sequences. Tenants with different cache scopes share no decoded image.

        Raises:
            InvalidRequest: an image cannot be decoded, is animated, or is too large; the message says which.
            Unsupported: the model takes no images here; the message says why.
            Overloaded: too many images wait to be decoded, or those of running sequences leave no room.
        """
        ...

    async def keep_images(self, images: Sequence[bytes], cache_seed: bytes) -> None:
        """Do what `look` does, for a sequence whose tokens are known."""
        ...

    def sequence(
        self, spec: SequenceSpec, purpose: Purpose, arrived_s: float | None = None
    ) -> AbstractAsyncContextManager[ServedSequence]:
        """Context manager: holds a sequence in the engine, and frees all that it holds on exit.

        The images of a sequence that is computed here are encoded before it is queued.

        Args:
            arrived_s: arrival time of its request, on the monotonic clock, for its place in the queue; None: now.

        Raises:
            Overloaded: too many sequences already wait; see `max_waiting`.
            InvalidRequest: it cannot fit, or has a token id outside the model's vocabulary, or the folder of its
                adapter holds something else than what was registered.
            Unsupported: it has an adapter, and this engine holds none.
            AdapterUnreadable: this worker cannot read its adapter.
            WorkerFailed: this worker cannot load its adapter.
            TransferRefused: it cannot continue from KV of another worker.
            ImagesMissing: it is computed here, and an image is neither cached, nor has `look` or `keep_images` received
                it lately.
            InvalidRequest: the model's encoder cannot encode one of its images.
            Overloaded: the device has too little free memory to encode one of its images.
            Unsupported: it has images, and the model takes none here.
            DeviceLost: the device cannot compute any more.
        """
        ...

    async def check_adapter(self, path: str) -> AdapterFacts:
        """Read an adapter's folder and compare it with the model; the adapter is not loaded.

        Raises:
            InvalidRequest: the folder cannot be read, or holds no adapter that fits this model.
            Unsupported: this engine holds no adapters.
        """
        ...

    def max_waiting(self, spec: SequenceSpec) -> float:
        """Return how many sequences may already be waiting when this one arrives."""
        ...

    async def pin_prefix(self, keys: Sequence[bytes]) -> Pin:
        """Pin the longest cached prefix of a chain of keys, one per hash block of 16 tokens (see `baton.blocks`)."""
        ...

    def unpin(self, pin: Pin) -> None:
        """Give a pin back."""
        ...

    def hand_back(self, reason: BatonError) -> None:
        """Raise `reason` in the `next` of sequences that hold nothing yet and have not started."""
        ...

    def hypotheses(self, spec: SequenceSpec) -> Hypotheses:
        """Return the state of a sequence's beam search; empty: it has none.

        Args:
            spec: the same object that was passed to `sequence`. An equal object may belong to another call.
        """
        ...

    def keys(self) -> list[bytes]:
        """Return every key whose prefix is cached."""
        ...

    def load(self) -> EngineLoad:
        """Return the engine's current load."""
        ...

    async def run(self, on_event: OnEngineEvent = ignore_event) -> None:
        """Execute steps until cancelled. A step that hangs is not waited for without a limit.

        Args:
            on_event: is called between two steps with the keys that were cached and evicted, in order, and always
                before a step or a transfer can overwrite an evicted block.

        Raises:
            DeviceLost: the device cannot compute any more. All sequences have received this error, and new ones receive
                it.
        """
        ...

    def lose(self, reason: str) -> NoReturn:
        """Give up the device because of a failure found outside its steps.

        Every sequence receives the error and has to continue on another worker. The caller must ensure that `run` ends.

        Raises:
            DeviceLost: always.
        """
        ...

    def close(self) -> None:
        """Free the device and end the engine's processes. Called once, after `run` has ended."""
        ...
