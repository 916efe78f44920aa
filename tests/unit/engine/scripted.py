"""An engine with a mind of its own behind the face, as one that Baton does not write may have.

It computes prompts in small parts and gives a sequence blocks only as it needs them; it reports once per part, with a
fence of its own; it generates none to three tokens at a time; and it preempts an answer once, of its own accord. Its
model is the arithmetic one, so every token can be worked out by hand. KV is in the cache only once its fence was
waited for, so a reader that waits for another fence, or for none, transfers junk.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn

from baton.blocks import num_blocks_for
from baton.cluster import BlockCounts, Computes
from baton.config import OWN_SETTINGS
from baton.costs import PRIOR
from baton.errors import BatonError, DeviceLost, InvalidRequest, Unsupported
from baton.hypotheses import NO_HYPOTHESES, Hypotheses
from baton.messages import PrefillReport, SeenImage, SequenceSpec
from baton.sampling import FinishReason
from baton.scores import NO_SCORES
from baton.tasks import cancel_and_wait
from engine.core.outputs import (
    Admitted,
    EngineLoad,
    Generated,
    Idle,
    KvProgress,
    OnEngineEvent,
    OnProgress,
    Output,
    Pin,
    Preempted,
    Reserved,
    ignore_event,
)
from engine.core.runner import BlockTables, KVSpec, StepInput, StepPart
from engine.core.sequence import Purpose
from engine.testing import ArithmeticRunner

PART_TOKENS = 24
"""Tokens of a prompt that are computed at a time: parts end within blocks."""
BURSTS = (1, 0, 3, 2)
"""Tokens that come at a time."""


class LateFence:
    """The KV of a part, in another process so far. Whoever waits gets it into the cache; so does the engine's step."""

    def __init__(self, write: Any) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._is_written = False
        self.num_waits = 0

    def wait(self, stream: Any) -> None:
        self.num_waits += 1
        self.reach()

    def reach(self) -> None:
        with self._lock:
            if not self._is_written:
                self._write()
                self._is_written = True


class ScriptedEngine:
    """`ServingEngine`, with one task per sequence.

    Args:
        draws_with_prompt: whether a PREFILL sequence yields a token; else only that its prompt is computed.
        computes_last_token: whether a RECEIVE sequence wants the KV of all tokens but the last, whose place has junk.
    """

    name = "scripted"
    unknown_settings = OWN_SETTINGS | {"kv_cache_gib", "tensor_parallel"}

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        runner: ArithmeticRunner | None = None,
        preempts: bool = True,
        delay_s: float = 0.0,
        draws_with_prompt: bool = True,
        computes_last_token: bool = False,
    ) -> None:
        self._runner = runner or ArithmeticRunner(num_blocks)
        self._free = [list(range(number)) for number in self._runner.num_blocks]
        self._keys = itertools.count()
        self._preempts = preempts
        self._delay_s = delay_s
        self._draws_with_prompt = draws_with_prompt
        self._computes_last_token = computes_last_token
        self._pins: dict[int, ScriptedSequence] = {}
        self._running: set[ScriptedSequence] = set()
        self._lost: DeviceLost | None = None
        self._has_ended: asyncio.Event = asyncio.Event()
        self._on_event: OnEngineEvent = ignore_event
        self._num_computed = 0
        self.fences: list[LateFence] = []
        self.num_preemptions = 0
        self.self_check = "ok"
        self.num_at_first = self.num_free

    @property
    def sampler(self) -> str:
        return self._runner.sampler

    @property
    def takes_images(self) -> bool:
        return False

    @property
    def image_placeholder(self) -> int | None:
        return None

    async def look(self, images: Sequence[bytes], cache_seed: bytes) -> tuple[SeenImage, ...]:
        raise Unsupported("this engine takes no images")

    async def keep_images(self, images: Sequence[bytes], cache_seed: bytes) -> None:
        await self.look(images, cache_seed)

    @property
    def computes(self) -> Computes:
        return self._runner.computes

    @property
    def spec(self) -> KVSpec:
        return self._runner.spec

    @property
    def num_blocks(self) -> tuple[int, ...]:
        return self._runner.num_blocks

    @property
    def caches(self) -> Sequence[Any]:
        return self._runner.caches

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    @property
    def num_free(self) -> int:
        return sum(len(free) for free in self._free)

    @contextlib.asynccontextmanager
    async def sequence(
        self, spec: SequenceSpec, purpose: Purpose, arrived_s: float | None = None
    ) -> AsyncIterator[ScriptedSequence]:
        if self._lost is not None:
            raise self._lost
        if not 0 < len(spec.token_ids) < self.max_model_len:
            raise InvalidRequest(f"{len(spec.token_ids)} tokens do not fit")
        if not all(0 <= token < self.vocab_size for token in spec.token_ids):
            raise InvalidRequest("a token id is outside the model's vocabulary")
        sequence = ScriptedSequence(self, spec, purpose, next(self._keys))
        self._running.add(sequence)
        task = asyncio.create_task(sequence.run())
        try:
            yield sequence
        finally:
            await cancel_and_wait((task,))
            self._running.discard(sequence)
            sequence.has_left = True
            self.give_back(sequence)
            if not self._running:
                self._on_event(Idle())
            assert task.cancelled() or task.exception() is None, task

    max_adapters = 0
    max_step_tokens = PART_TOKENS

    async def check_adapter(self, path: str) -> NoReturn:
        raise Unsupported("this engine holds no adapters")

    def max_waiting(self, spec: SequenceSpec) -> float:
        return 100

    async def pin_prefix(self, keys: Sequence[bytes]) -> Pin:
        await asyncio.sleep(0)
        return Pin(next(self._keys), ((),))

    def pin(self, sequence: ScriptedSequence) -> Pin:
        pin = Pin(next(self._keys), sequence.tables)
        self._pins[pin.pin_id] = sequence
        return pin

    def unpin(self, pin: Pin) -> None:
        if (sequence := self._pins.pop(pin.pin_id, None)) is not None:
            self.give_back(sequence)

    def give_back(self, sequence: ScriptedSequence) -> None:
        """Frees the blocks of a sequence that has left, once nobody reads them."""
        if sequence.has_left and sequence not in self._pins.values():
            self.free(sequence)

    def free(self, sequence: ScriptedSequence) -> None:
        for free, blocks in zip(self._free, sequence.blocks, strict=True):
            free[:0] = blocks
            blocks.clear()

    def hypotheses(self, spec: SequenceSpec) -> Hypotheses:
        return NO_HYPOTHESES

    def hand_back(self, reason: BatonError) -> None:
        raise NotImplementedError

    def keys(self) -> list[bytes]:
        return []

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            waiting=0,
            queued_tokens=0,
            blocks=BlockCounts(self.num_at_first, self.num_free, 0, self.num_at_first - self.num_free),
            preemptions=self.num_preemptions,
            costs=PRIOR,
            busy_s=0.0,
            computed_tokens=self._num_computed,
        )

    def lose(self, reason: str) -> NoReturn:
        self._lost = DeviceLost(reason)
        for sequence in self._running:
            sequence.fail(self._lost)
        self._has_ended.set()
        raise self._lost

    async def run(self, on_event: OnEngineEvent = ignore_event) -> None:
        self._on_event = on_event
        await self._has_ended.wait()
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        self._runner.close()

    def take(self, group: int) -> int:
        return self._free[group].pop()

    def compute(self, step: StepInput) -> tuple[int, ...]:
        self._num_computed += sum(len(part.token_ids) for part in step.parts)
        return self._runner.execute(step).sampled_token_ids[0]


class ScriptedSequence:
    """`ServedSequence`."""

    def __init__(self, engine: ScriptedEngine, spec: SequenceSpec, purpose: Purpose, key: int) -> None:
        self.blocks: list[list[int]] = [[] for _ in engine.spec.groups]
        """The block table of each layer group."""
        self.has_left = False
        self._engine = engine
        self._spec = spec
        self._purpose = purpose
        self._key = key
        self._tokens = list(spec.token_ids)
        self._num_computed = 0
        self._queue: asyncio.Queue[Output | BatonError] = asyncio.Queue()
        self._watchers: list[OnProgress] = []
        self._inserted: asyncio.Future[tuple[int | None, int | None]] = asyncio.get_running_loop().create_future()
        self._arrived_s = time.monotonic()

    # -- the face ------------------------------------------------------------------------------------------------------

    async def next(self) -> Output:
        output = await self._queue.get()
        if isinstance(output, BatonError):
            raise output
        return output

    def take_ready(self) -> list[Output]:
        return []

    async def pin(self) -> Pin:
        await asyncio.sleep(0)  # a round trip
        return self._engine.pin(self)

    def watch(self, on_progress: OnProgress) -> None:
        on_progress(KvProgress(self._num_computed, self._engine.spec.num_layers, None, self.tables))
        self._watchers.append(on_progress)

    def fail(self, error: BatonError) -> None:
        self._queue.put_nowait(error)

    def insert(self, first_token: int | None, num_tokens: int | None = None) -> None:
        self._inserted.set_result((first_token, num_tokens))

    def adopt(self, num_tokens: int) -> None:
        """Nothing is cached here."""

    # -- what it does --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        match self._purpose:
            case Purpose.PREFILL:
                self._grow(PART_TOKENS)
                self._queue.put_nowait(Admitted(self._key, self.tables, 0))
                await asyncio.sleep(0.01)
                await self._compute_prompt()
                token_ids = (self._sample(),) if self._engine._draws_with_prompt else ()
                self._queue.put_nowait(Generated(self._key, token_ids, report=PrefillReport(prefill_s=0.001)))
            case Purpose.RECEIVE:
                self._grow(len(self._tokens))
                num_wanted = len(self._tokens) - self._engine._computes_last_token
                self._queue.put_nowait(
                    Reserved(sequence_key=self._key, block_ids=self.tables, num_tokens=num_wanted, num_cached_tokens=0)
                )
                first_token, num_tokens = await self._inserted
                self._num_computed = len(self._tokens) if num_tokens is None else num_tokens
                if first_token is not None:
                    self._tokens.append(first_token)
                await self._generate(None)
            case Purpose.GENERATE:
                await self._compute_prompt()
                await self._generate(PrefillReport(prefill_s=0.001))

    async def _generate(self, report: PrefillReport | None) -> None:
        for turn in itertools.count():
            if turn == 2 and self._engine._preempts:
                await self._preempt()
            burst: list[int] = []
            for _ in range(BURSTS[turn % len(BURSTS)]):
                if self._finish_reason() is None:
                    burst.append(self._sample())
                    self._tokens.append(burst[-1])
            if self._put(tuple(burst), report):
                return
            report = report if not burst else None
            await asyncio.sleep(0.001)

    def _put(self, token_ids: tuple[int, ...], report: PrefillReport | None) -> bool:
        reason = self._finish_reason()
        self._queue.put_nowait(Generated(self._key, token_ids, reason, NO_SCORES, report if token_ids else None))
        return reason is not None

    def _finish_reason(self) -> FinishReason | None:
        num_generated = len(self._tokens) - self._spec.num_prompt_tokens
        if num_generated and self._tokens[-1] in self._spec.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_generated >= self._spec.max_tokens else None

    async def _preempt(self) -> None:
        """Loses its blocks and computes everything again in others."""
        self._engine.num_preemptions += 1
        self._engine.free(self)
        self._num_computed = 0
        self._queue.put_nowait(Preempted(self._key))
        await self._compute_prompt()

    async def _compute_prompt(self) -> None:
        """All known tokens but the last, part by part; each is reported before it is in the cache."""
        end = len(self._tokens) - (self._purpose is not Purpose.PREFILL)
        while self._num_computed < end:
            stop = min(self._num_computed + PART_TOKENS, end)
            self._grow(stop)
            part = self._part(self._num_computed, stop)
            fence = LateFence(lambda part=part: self._engine.compute(StepInput((part,))))
            self._engine.fences.append(fence)
            for on_progress in self._watchers:
                on_progress(KvProgress(stop, self._engine.spec.num_layers, fence, self.tables))
            await asyncio.sleep(self._engine._delay_s)
            fence.reach()
            self._num_computed = stop

    def _sample(self) -> int:
        """Computes what is missing, the last known token at least, and samples the next one."""
        end = len(self._tokens)
        self._grow(end)
        (token,) = self._engine.compute(StepInput((self._part(min(self._num_computed, end - 1), end),)))
        self._num_computed = end
        return token

    @property
    def tables(self) -> BlockTables:
        return tuple(tuple(blocks) for blocks in self.blocks)

    def _grow(self, num_tokens: int) -> None:
        for number, (group, blocks) in enumerate(zip(self._engine.spec.groups, self.blocks, strict=True)):
            while len(blocks) < num_blocks_for(num_tokens, group.block_size):
                blocks.append(self._engine.take(number))

    def _part(self, start: int, end: int) -> StepPart:
        return StepPart(
            sequence_key=self._key,
            token_ids=tuple(self._tokens[start:end]),
            num_computed_tokens=start,
            block_ids=self.tables,
            num_kv_tokens=(end,) * len(self.blocks),
            sample=end == len(self._tokens),
            is_decoding=False,
            sampling=self._spec.sampling,
            choice_index=self._spec.choice_index,
            num_prompt_tokens=self._spec.num_prompt_tokens,
            history=tuple(self._tokens),
        )
