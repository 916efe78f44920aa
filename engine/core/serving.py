"""The engine's face: all that services, KV endpoint and member use of an engine.

`EngineLoop` is Baton's own engine behind it. Another one may run elsewhere, so whatever may take a round trip is
awaited, and values come back, never the engine's own objects. A tests' engine with a mind of its own stands behind the
same face.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, Protocol

from baton.errors import BatonError
from baton.hypotheses import Hypotheses
from baton.messages import SequenceSpec
from engine.core.kv_spec import KVSpec
from engine.core.outputs import EngineLoad, OnProgress, Output, Pin
from engine.core.sequence import Purpose


class ServedSequence(Protocol):
    """A sequence in an engine, for as long as its context is entered."""

    async def next(self) -> Output:
        """Returns the next output, once there is one.

        A RECEIVE sequence begins with `Reserved`, a PREFILL sequence with `Admitted`; `Generated` follows until one has
        a finish reason. `Preempted` may come at any time.

        Raises:
            WorkerFailed: the step that would have made it failed, or, as DeviceLost, all that would follow.
            BatonError: the sequence was handed back (`ServingEngine.hand_back`).
        """
        ...

    def take_ready(self) -> list[Output]:
        """Returns outputs that are there already, so that a slow reader gets several at once."""
        ...

    async def pin(self) -> Pin:
        """Pins all blocks of the sequence, those included that it gets later; `ServingEngine.unpin` ends it."""
        ...

    def watch(self, on_progress: OnProgress) -> None:
        """Reports how far the sequence's KV has come into its blocks.

        What a report says stays true for as long as the blocks are held or pinned. The first one comes at once, with
        what is computed already, in all layers; then at least one comes for each step that computes the sequence, when
        the step ends and all layers are there; and, where the engine can, one after each layer, from its own thread. A
        step begins with one layer and more tokens than the step before, which takes nothing back; nor does the end of a
        step that is reported after the next one has begun.

        `on_progress` must be quick, since a step waits for it, must not raise, and must be safe to call in any thread.
        It is called no more once the sequence's context is left, but for a call that is under way at that moment.
        """
        ...

    def insert(self, first_token: int | None, num_tokens: int | None = None) -> None:
        """Lets a RECEIVE sequence run whose KV has arrived.

        Where the first token ends the sequence already, `Generated` follows without tokens, with the finish reason.

        Args:
            first_token: the next token, which the engine must take; None: it draws the token itself.
            num_tokens: leading tokens whose KV arrived, where it is not all of them.
        """
        ...

    def adopt(self, num_tokens: int) -> None:
        """Leaves the KV of the first `num_tokens` tokens, which have arrived, in the prefix cache."""
        ...


class ServingEngine(Protocol):
    """An engine as its worker sees it."""

    @property
    def name(self) -> str:
        """The engine's name, as the cluster shows it."""
        ...

    @property
    def sampler(self) -> str:
        """The name of its sampler (see `Runner`): a drawn answer goes on only on engines that give the same."""
        ...

    @property
    def spec(self) -> KVSpec:
        """The shape of each rank's KV cache."""
        ...

    @property
    def caches(self) -> Sequence[Any]:
        """Every rank's KV cache, in a type that the KV transfer knows; block ids mean the same in all of them."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: a token id is less."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens."""
        ...

    @property
    def self_check(self) -> str:
        """`ok`, or what the engine has found wrong with its own books."""
        ...

    def sequence(
        self, spec: SequenceSpec, purpose: Purpose, arrived_s: float | None = None
    ) -> AbstractAsyncContextManager[ServedSequence]:
        """Holds a sequence in the engine while the block is entered; leaving it frees all it holds.

        Args:
            arrived_s: when its request came, on the monotonic clock, if that was not just now: its place in the queue.

        Raises:
            Overloaded: too many sequences wait already; see `max_waiting`.
            InvalidRequest: it cannot fit, or has a token id that the model has no embedding for.
            TransferRefused: it cannot go on from KV that comes from elsewhere.
            DeviceLost: nothing is computed here any more.
        """
        ...

    def max_waiting(self, spec: SequenceSpec) -> float:
        """Returns how many sequences may wait already when this one comes."""
        ...

    async def pin_prefix(self, keys: Sequence[bytes]) -> Pin:
        """Pins the longest cached prefix of a chain of keys, one per hash block of 16 tokens (see `baton.blocks`)."""
        ...

    def unpin(self, pin: Pin) -> None:
        """Gives a pin back."""
        ...

    def hand_back(self, reason: BatonError) -> None:
        """Raises `reason` in the `next` of sequences that hold nothing yet and have not begun."""
        ...

    def hypotheses(self, spec: SequenceSpec) -> Hypotheses:
        """Returns where a sequence's beam search is; empty: it has none.

        Args:
            spec: the object that `sequence` was entered with. An equal one may be that of another call.
        """
        ...

    def keys(self) -> list[bytes]:
        """Returns every key whose prefix is cached."""
        ...

    def load(self) -> EngineLoad:
        """Returns what the engine has to do and what it holds."""
        ...

    async def run(self) -> None:
        """Steps until cancelled. A step that hangs is no step: nothing waits for it without a limit.

        Raises:
            DeviceLost: the device computes nothing more. All sequences have had it, and those that come get it.
        """
        ...

    def lose(self, reason: str) -> NoReturn:
        """Gives up the device, for a reason that something else than a step has found: every sequence gets it, and has
        to go on elsewhere. The caller sees to it that `run` ends.

        Raises:
            DeviceLost: always.
        """
        ...
