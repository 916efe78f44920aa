"""vLLM as a worker's engine (`serving.ServingEngine`): the part in the worker's process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from baton.adapters import AdapterFacts
from baton.blocks import HASH_BLOCK
from baton.cluster import BlockCounts, Computes, fallback
from baton.config import Config, EngineConfig
from baton.costs import StepFit, StepSize
from baton.errors import (
    BatonError,
    ConfigError,
    DeviceLost,
    InvalidRequest,
    LostInStep,
    Overloaded,
    TransferRefused,
    Unsupported,
)
from baton.hypotheses import NO_HYPOTHESES, Hypotheses
from baton.memory import GIB, available_memory
from baton.messages import PrefillReport, SeenImage, SequenceSpec
from baton.sampling import FinishReason
from baton.tasks import seen_through
from baton.tokenizer_file import end_of_sequence_ids
from baton.turns import Turns
from engine.core.loop import MAX_PREPARING, NUM_PREPARING
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
from engine.core.runner import KVSpec
from engine.core.sequence import Purpose
from engine.sampling.pipeline import SAMPLER
from engine.sampling.structure import Structures
from engine.vllm.admission import Admission, Hosted
from engine.vllm.arguments import arguments_of, cpu_arguments_of, require_device
from engine.vllm.block_names import BlockNames
from engine.vllm.caches import opened
from engine.vllm.handles import PinnedBlocks, VllmSequence, scores_of
from engine.vllm.messages import (
    Abort,
    Add,
    Adopt,
    Allocated,
    Budget,
    Counts,
    Failed,
    Insert,
    LayerDone,
    Lost,
    Message,
    Ping,
    Pinned,
    PinPrefix,
    Progress,
    Start,
    Stepped,
    Unpin,
    values_of,
)
from engine.vllm.process import HostProcess
from engine.vllm.versions import installed_version, require_supported

logger = logging.getLogger(__name__)
CONTEXT_BYTES = GIB
"""Memory of a GPU that the worker's CUDA context takes."""
HUNG = 20.0
"""A host counts as hung after this multiple of the longest expected step, or after `engine.step_timeout_s` if that is
longer."""
MAX_NAME = 64
"""Maximum length of a name in a lease, in characters."""
NOT_OF_NAMES = re.compile(r"[^\w.+/:-]+", re.ASCII)
"""Characters that a name in a lease cannot have."""
PINGS = 4
"""Number of pings to an idle host in each `engine.step_timeout_s`."""


def vllm_engine(config: Config, cache: Path) -> VllmEngine:
    """Start vLLM and return the engine over it. This takes seconds to minutes.

    Args:
        cache: Baton's cache folder.

    Raises:
        ModelLoadError, ConfigError: vLLM cannot be started as configured; the message says why.
    """
    settings, model = config.engine, config.model
    require_supported(installed_version(settings.vllm_python))
    start = Start(
        arguments=arguments_of(model, settings, settings.memory_share),
        eos_token_ids=list(end_of_sequence_ids(Path(model.path))),
        cpu_arguments=cpu_arguments_of(model, settings, available_memory(settings.memory_share)),
        pins_by_request=config.testing.pins_by_request,
        # In mode aggregated vLLM on GPUs runs without a connector, whose interface may change with any of its versions.
        exchange_bytes=0 if config.router.mode == "aggregated" else config.transfer.gpu_bytes(1) + CONTEXT_BYTES,
    )
    host = HostProcess.start(settings.vllm_python, start, cache, settings.num_threads)
    try:
        require_device(model.device, host.ready.device)
        if config.router.mode == "disaggregated" and host.ready.memory is None:
            raise ConfigError(
                f"router.mode is disaggregated, but this worker's vLLM exchanges no KV: {host.ready.why_not_shared}; "
                "set router.mode to aggregated"
            )
        return VllmEngine(host, settings, start.eos_token_ids, Path(model.path))
    except BaseException:
        host.close()
        raise


class VllmEngine:
    """Queue, reservations, block keys and outputs of the sequences that vLLM computes.

    The host reports each step once. The engine updates all its state from these reports, on the event loop.
    """

    max_adapters = 0
    takes_images = False
    image_placeholder = None

    def __init__(self, host: HostProcess, settings: EngineConfig, eos_token_ids: Sequence[int], folder: Path) -> None:
        self.self_check = "ok"
        self._host = host
        self._opened = opened(host.ready, host.memory, host.descriptors)
        self._ready = ready = self._opened.ready
        self._settings = settings
        self._eos_token_ids = tuple(eos_token_ids)
        batch = settings.batch(on_gpu=bool(ready.device))
        self._admission = Admission(
            ready.groups,
            ready.num_blocks,
            max_num_seqs=batch.max_num_seqs,
            max_step_tokens=ready.max_num_batched_tokens,
            output_reservation=settings.output_reservation,
        )
        self._max_model_len = self._admission.longest(ready.max_model_len)
        self._caches: tuple[Any, ...] = (self._opened.cache,)
        self._spec = self._opened.cache.spec
        self._names = BlockNames(keeps_tokens=ready.pins_by_request)
        self._fit = StepFit()
        self._outputs: dict[int, asyncio.Queue[Output | BatonError]] = {}
        """Unread outputs, by sequence key."""
        self._pins: dict[int, PinnedBlocks] = {}
        self._pin_ids = itertools.count()
        self._by_name: dict[int, Hosted] = {}
        """Sequences that vLLM has, by their names there."""
        tokenizer = folder / "tokenizer.json"
        below = [token for token in eos_token_ids if token < ready.vocab_size]
        self._structures = Structures(tokenizer if tokenizer.exists() else None, ready.vocab_size, below)
        self._structures.load()
        self._preparing = Turns(NUM_PREPARING, MAX_PREPARING)
        self._counts = Counts(ready.num_blocks, 0, 0, -1)
        self._num_sent_tokens = 0
        """Prompt tokens sent to the host since its last `Counts`."""
        self._busy_s, self._num_computed = 0.0, 0
        self._budget = 0
        self._on_event: OnEngineEvent = ignore_event
        self._changed = asyncio.Event()
        """Set when the queue or the reservations have changed."""
        self._was_idle = False
        self._is_running = False
        self._watchers: dict[int, tuple[OnProgress, ...]] = {}
        self._owed_since_s = math.inf
        """Time since which the worker waits for a message of the host; infinite: it expects none."""
        self._lost: DeviceLost | None = None

    # -- properties ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return f"vllm/{self._ready.version}"

    @property
    def sampler(self) -> str:
        return SAMPLER

    @property
    def computes(self) -> Computes:
        ready = self._ready
        return Computes(
            gpu=ready.device,
            num_ranks=self._settings.tensor_parallel,
            dtype=ready.dtype,
            weights=ready.quantization or "exact",
            kv_dtype=ready.dtype if ready.kv_dtype == "auto" else ready.kv_dtype,
            fallbacks=(fallback("no KV is exchanged", why),) if (why := ready.why_not_shared) else (),
            attention=NOT_OF_NAMES.sub("-", ready.attention)[:MAX_NAME],
        )

    @property
    def spec(self) -> KVSpec:
        return self._spec

    @property
    def num_blocks(self) -> tuple[int, ...]:
        return tuple(self._caches[0].table_sizes)

    @property
    def caches(self) -> Sequence[Any]:
        return self._caches

    @property
    def vocab_size(self) -> int:
        return self._ready.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def max_step_tokens(self) -> int:
        return self._ready.max_num_batched_tokens

    @property
    def is_idle(self) -> bool:
        """True if no sequence is known, and nothing is pinned."""
        return not self._outputs and not self._pins and not self._admission.running

    def load(self) -> EngineLoad:
        """See `ServingEngine.load`. While sequences run, the number of free blocks that are cached is an estimate."""
        total = self._ready.num_blocks
        # `Allocated` may report blocks of the running step before `Counts` does at its end.
        num_known = len({block for sequence in self._admission.running for block in sequence.block_ids})
        free = min(self._counts.num_free, total - num_known)
        cached = min(free, max(0, len(self._names) - (total - free)))
        waiting = self._admission.waiting
        return EngineLoad(
            running=len(self._admission.running),
            waiting=len(waiting),
            queued_tokens=sum(sequence.num_tokens for sequence in waiting)
            + self._counts.num_uncomputed
            + self._num_sent_tokens,
            blocks=BlockCounts(total, free - cached, cached, total - free),
            preemptions=self._admission.num_preemptions + self._counts.num_preempted,
            costs=self._fit.costs,
            busy_s=self._busy_s,
            computed_tokens=self._num_computed,
        )

    def keys(self) -> list[bytes]:
        """See `ServingEngine.keys`."""
        return self._names.keys()

    def max_waiting(self, spec: SequenceSpec) -> float:
        """See `ServingEngine.max_waiting`."""
        return math.inf if spec.is_continued else self._settings.max_waiting

    def hypotheses(self, spec: SequenceSpec) -> Hypotheses:
        """Return no hypotheses: this engine searches no beams."""
        return NO_HYPOTHESES

    # -- unsupported features ------------------------------------------------------------------------------------------

    async def look(self, images: Sequence[bytes], cache_seed: bytes) -> tuple[SeenImage, ...]:
        """Raise Unsupported."""
        raise Unsupported("engine.runner vllm takes no images; serve this model with Baton's own engine")

    async def keep_images(self, images: Sequence[bytes], cache_seed: bytes) -> None:
        """Raise Unsupported."""
        await self.look(images, cache_seed)

    async def check_adapter(self, path: str) -> AdapterFacts:
        """Raise Unsupported."""
        raise Unsupported("engine.runner vllm holds no adapters; serve them with Baton's own engine")

    # -- pins ----------------------------------------------------------------------------------------------------------

    async def pin_prefix(self, keys: Sequence[bytes]) -> Pin:
        """See `ServingEngine.pin_prefix`. vLLM may have evicted blocks that its host has not reported yet."""
        if self._ready.memory is None or not self._is_running:
            return Pin(-1, ((),))
        num_parts = self._spec.block_size // HASH_BLOCK
        names = list(itertools.takewhile(bool, map(self._names.name_of, keys[num_parts - 1 :: num_parts])))
        num_needed = len(names) + 1 if self._ready.pins_by_request else 0  # the request computes a token
        if not names or num_needed > self._admission.num_free:
            return Pin(-1, ((),))
        pin_id = next(self._pin_ids)
        self._pins[pin_id] = pinned = PinnedBlocks()
        # As many as it may take, so that no sequence gets them meanwhile; and each one may be shared instead.
        pinned.num_taken = num_needed or min(len(names), max(0, self._admission.num_free))
        pinned.num_blocks = pinned.num_taken + len(names)
        self._admission.pin(pinned.num_taken, pinned.num_blocks)
        cached = [name for name in names if name]
        self._send(PinPrefix(pin_id, cached, pinned.num_taken, *self._names.tokens_of(cached)))
        try:
            await pinned.is_known
        except asyncio.CancelledError:
            if pinned.is_known.cancelled():
                pinned.is_unwanted = True
            else:  # the answer came in the same turn of the event loop
                self.unpin(Pin(pin_id, ()))
            raise
        return Pin(pin_id, (tuple(pinned.block_ids),), len(pinned.block_ids) * self._spec.block_size)

    def unpin(self, pin: Pin) -> None:
        """See `ServingEngine.unpin`."""
        if (pinned := self._pins.pop(pin.pin_id, None)) is None:
            return
        if pinned.sequence is not None:
            pinned.sequence.num_pins -= 1
            self._release(pinned.sequence)
        else:
            self._admission.pin(0, -pinned.num_blocks)
            self._send(Unpin(pin.pin_id))
        self._changed.set()

    def pin(self, sequence: Hosted) -> Pin:
        """See `ServedSequence.pin`.

        Raises:
            TransferRefused: the sequence is not computed for another worker.
        """
        if sequence.purpose is not Purpose.PREFILL:
            raise TransferRefused("only the blocks of a prompt that is computed for another worker can be pinned")
        pin_id = next(self._pin_ids)
        self._pins[pin_id] = PinnedBlocks(sequence)
        sequence.num_pins += 1
        return Pin(pin_id, (sequence.block_ids,))

    # -- sequences -----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def sequence(
        self, spec: SequenceSpec, purpose: Purpose, arrived_s: float | None = None
    ) -> AsyncIterator[VllmSequence]:
        """See `ServingEngine.sequence`."""
        if self._lost is not None:
            raise self._lost
        if len(self._admission.waiting) >= self.max_waiting(spec):
            raise Overloaded("the worker's queue is full; try again later")
        self._require_computable(spec, purpose)
        arrived_s = time.monotonic() if arrived_s is None else arrived_s
        if spec.sampling.is_structured:
            await self._prepare(spec)
            if (lost := self._lost) is not None:  # meanwhile
                raise lost
        most = min(spec.num_prompt_tokens + spec.max_tokens, self._max_model_len)
        if purpose is not Purpose.GENERATE:
            most = len(spec.token_ids) + 1 if purpose is Purpose.PREFILL or not spec.max_tokens else most
        most = max(most, len(spec.token_ids) + 1)
        sequence = Hosted(spec=spec, purpose=purpose, arrival_s=arrived_s, most_tokens=most)
        queue = self._outputs[sequence.key] = asyncio.Queue()
        self._admission.add(sequence)
        self._was_idle = False
        self._changed.set()
        try:
            yield VllmSequence(self, sequence, queue)
        finally:
            del self._outputs[sequence.key]
            self._watchers.pop(sequence.key, None)
            sequence.has_left = True
            self._release(sequence)

    def _require_computable(self, spec: SequenceSpec, purpose: Purpose) -> None:
        if purpose is not Purpose.GENERATE and self._ready.memory is None:
            raise TransferRefused("this worker's vLLM exchanges no KV; set router.mode to aggregated")
        if not 0 < len(spec.token_ids) < self._max_model_len:
            raise InvalidRequest(
                f"{len(spec.token_ids)} tokens do not fit; this worker takes 1 to {self._max_model_len - 1}"
            )
        for ids in (spec.token_ids, *spec.sampling.named_token_ids.values()):
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                bad = next(token for token in ids if not 0 <= token < self.vocab_size)
                raise InvalidRequest(
                    f"token id {bad} is outside the model's vocabulary, whose ids are 0 to {self.vocab_size - 1}"
                )
        if spec.sampling.use_beam_search:
            raise Unsupported("use_beam_search is not supported by engine.runner vllm; unset it", "use_beam_search")
        if spec.sampling.logprob_token_ids:  # vLLM would report other tokens, to other sequences of the step as well
            raise Unsupported("logprob_token_ids is not supported by engine.runner vllm; unset it", "logprob_token_ids")
        if spec.adapter is not None:
            raise Unsupported("engine.runner vllm holds no adapters")
        if spec.images:
            raise Unsupported("engine.runner vllm takes no images")

    async def _prepare(self, spec: SequenceSpec) -> None:
        """Compile a structure, to refuse an unsupported one. Tenants take turns. The host compiles it again."""
        async with self._preparing.turn(spec.cache_seed.hex(), 1):
            preparing = asyncio.ensure_future(asyncio.to_thread(self._structures.prepare, spec.sampling))
            await seen_through(preparing)
        preparing.result()

    def _release(self, sequence: Hosted) -> None:
        """Free what a sequence holds, once its context is left and no pin holds its blocks."""
        if not sequence.has_left or sequence.num_pins:
            return
        if (name := self._admission.remove(sequence)) >= 0:
            self._by_name.pop(name, None)
            self._send(Abort(name))
        self._changed.set()

    def hand_back(self, reason: BatonError) -> None:
        """See `ServingEngine.hand_back`."""
        for sequence in self._admission.waiting:
            if not sequence.was_admitted and sequence.key in self._outputs:
                self._outputs[sequence.key].put_nowait(reason)

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def run(self, on_event: OnEngineEvent = ignore_event) -> None:
        """See `ServingEngine.run`."""
        self._on_event = on_event
        try:
            async with self._host.connected(), asyncio.TaskGroup() as tasks:
                self._is_running = True
                tasks.create_task(self._receive())
                tasks.create_task(self._admit())
                tasks.create_task(self._watch())
        finally:
            self._is_running = False
            for pinned in self._pins.values():  # they pin nothing: the host answers no more
                if not pinned.is_known.done():
                    pinned.is_known.set_result(None)

    async def _admit(self) -> NoReturn:
        """Add the sequences that fit to vLLM, each time that something has changed."""
        while True:
            self._changed.clear()
            change = self._admission.advance(
                time.monotonic(), self._fit.costs, self._counts.num_uncomputed + self._num_sent_tokens
            )
            for sequence, name in change.left:
                self._by_name.pop(name, None)
                self._send(Abort(name))
                self._put(sequence, Preempted(sequence.key))
            if change.num_prompt_tokens != self._budget:
                self._budget = change.num_prompt_tokens
                self._send(Budget(self._budget))
            for sequence in change.admitted:
                self._by_name[sequence.name] = sequence
                if sequence.purpose is not Purpose.RECEIVE:
                    self._num_sent_tokens += sequence.num_tokens
                self._send(self._added(sequence))
            if change.left:
                continue  # the freed blocks may suffice for others
            self._note_idleness()
            await self._changed.wait()

    def _added(self, sequence: Hosted) -> Add:
        spec, stops = sequence.spec, sequence.spec.sampling.stop_token_ids
        eos = () if spec.sampling.ignore_eos else self._eos_token_ids
        sampling = values_of(spec.sampling)
        if not sequence.scores_prompt:
            sampling.pop("prompt_logprobs", None)  # vLLM would compute all of the prompt, and not wait for its KV
        return Add(
            key=sequence.name,
            token_ids=sequence.token_ids,
            num_prompt_tokens=spec.num_prompt_tokens,
            num_new_tokens=max(1, sequence.most_tokens - sequence.num_tokens) if spec.max_tokens else 0,
            stop_token_ids=list(dict.fromkeys((*stops, *eos))),
            choice_index=spec.choice_index,
            salt=spec.key_seed.hex(),
            sampling=sampling,
            purpose=sequence.purpose.value,
        )

    def _send(self, message: Message) -> None:
        """Send a command. After commands that need an answer, expect a message of the host from now on."""
        if self._lost is not None:
            return
        self._host.send(message)
        if isinstance(message, (Add, Insert, PinPrefix, Ping)) and self._owed_since_s == math.inf:
            self._owed_since_s = time.monotonic()

    async def _receive(self) -> NoReturn:
        while True:
            try:
                message = await self._host.receive()
            except (EOFError, OSError):
                self._lose_host(await asyncio.to_thread(self._host.why_ended))
            except ValueError as error:
                self._lose_host(str(error))
            now = time.monotonic()
            self._handle(message, now)
            self._owed_since_s = now if any(each.awaits_step for each in self._by_name.values()) else math.inf
            self._changed.set()

    def _handle(self, message: Message, now: float) -> None:
        match message:
            case Stepped():
                self._take(message, now)
            case Allocated():
                self._allocated(message)
            case LayerDone(num_layers, ends):
                self._report(ends, num_layers)
            case Pinned():
                self._pinned(message)
            case Failed(name, reason):
                if (sequence := self._by_name.pop(name, None)) is not None:
                    self._admission.remove(sequence)
                    self._put(sequence, InvalidRequest(reason))
            case Lost(reason):
                self._lose_host(reason)

    def _take(self, stepped: Stepped, now: float) -> None:
        """Record a step."""
        num_new, num_pairs, num_decoding, num_context = stepped.size
        if num_new:
            size = StepSize(num_new=num_new, num_pairs=num_pairs, num_decoding=num_decoding, num_kv_tokens=num_context)
            self._fit.observe(size, stepped.took_s)
            self._busy_s += stepped.took_s
            self._num_computed += num_new
        self._counts, self._num_sent_tokens = stepped.counts, 0
        for change in self._names.update(stepped.stored, stepped.removed):
            self._on_event(change)
        self._report(stepped.ends, self._spec.num_layers)
        for progress in stepped.progress:
            if (sequence := self._by_name.get(progress.key)) is not None:
                self._advance(sequence, progress, now)

    def _allocated(self, message: Allocated) -> None:
        """Record the blocks of a sequence that other workers read or write."""
        if (sequence := self._by_name.get(message.key)) is None:
            return
        is_first, sequence.block_ids = not sequence.block_ids, tuple(message.block_ids)
        tables = (sequence.block_ids,)
        if sequence.purpose is Purpose.RECEIVE:
            num_tokens, num_cached = len(sequence.spec.token_ids), message.num_cached_tokens
            sequence.num_cached_tokens = min(num_cached, num_tokens)
            self._put(
                sequence,
                Reserved(
                    sequence_key=sequence.key,
                    block_ids=tables,
                    num_tokens=num_tokens,
                    num_cached_tokens=min(num_cached, num_tokens),
                ),
            )
        elif is_first:
            # Another sequence of the same step may compute the cached blocks: wait for the step's report.
            sequence.num_cached_tokens = message.num_cached_tokens
            self._put(sequence, Admitted(sequence.key, tables, message.num_cached_tokens))
        else:
            self._notify(sequence, sequence.num_computed_tokens, self._spec.num_layers)

    def _report(self, ends: Sequence[tuple[int, int]], num_layers: int) -> None:
        """Report the progress of the KV of sequences that are computed for other workers."""
        for name, num_tokens in ends:
            if (sequence := self._by_name.get(name)) is not None:
                if num_layers == self._spec.num_layers:
                    sequence.num_computed_tokens = num_tokens
                self._notify(sequence, num_tokens, num_layers)

    def _notify(self, sequence: Hosted, num_tokens: int, num_layers: int) -> None:
        for on_progress in self._watchers.get(sequence.key, ()):
            on_progress(KvProgress(num_tokens, num_layers, None, (sequence.block_ids,)))

    def _pinned(self, message: Pinned) -> None:
        if (pinned := self._pins.get(message.pin_id)) is None:
            return
        num_blocks = max(len(message.block_ids), message.num_taken)
        self._admission.pin(message.num_taken - pinned.num_taken, num_blocks - pinned.num_blocks)
        pinned.block_ids, pinned.num_taken, pinned.num_blocks = message.block_ids, message.num_taken, num_blocks
        if pinned.is_unwanted:
            self.unpin(Pin(message.pin_id, ()))
        elif not pinned.is_known.done():
            pinned.is_known.set_result(None)

    def _advance(self, sequence: Hosted, progress: Progress, now: float) -> None:
        """Record a sequence's new tokens."""
        report = None
        tokens = progress.token_ids[sequence.num_skipped_tokens :]
        sequence.num_skipped_tokens = 0
        sequence.token_ids += tokens
        is_computed_here = not sequence.num_inserted_tokens
        if is_computed_here and progress.num_cached_tokens >= 0 and not sequence.first_token_s:
            sequence.num_cached_tokens = min(progress.num_cached_tokens, sequence.spec.num_prompt_tokens)
        if not sequence.first_token_s and progress.token_ids:
            sequence.first_token_s = now
            if is_computed_here:
                report = PrefillReport(
                    num_cached_tokens=sequence.num_cached_tokens,
                    queue_s=sequence.scheduled_s - sequence.arrival_s,
                    prefill_s=now - sequence.scheduled_s,
                    room_s=sequence.blocked_s,
                    prompt_scores=scores_of(progress.prompt_logprobs, sequence.spec.sampling.prompt_logprobs or 0),
                )
        finish = FinishReason(progress.finish) if progress.finish else None
        if sequence.purpose is Purpose.PREFILL:
            is_over = sequence.spec.num_prompt_tokens + sequence.spec.max_tokens <= sequence.num_tokens
            finish = finish if finish is FinishReason.STOP or is_over else None
        elif finish is not None:
            self._by_name.pop(progress.key)
            self._admission.remove(sequence)
        logprobs = progress.logprobs[len(progress.token_ids) - len(tokens) :]
        scores = scores_of(logprobs, sequence.spec.sampling.logprobs or 0)
        if tokens or finish is not None:
            self._put(sequence, Generated(sequence.key, tuple(tokens), finish, scores, report))

    def _put(self, sequence: Hosted, output: Output | BatonError) -> None:
        if (queue := self._outputs.get(sequence.key)) is not None:
            queue.put_nowait(output)

    def _note_idleness(self) -> None:
        """When the engine becomes idle, check the accounting once, and report `Idle`."""
        if self._was_idle or not self.is_idle or self._counts.num_free < self._ready.num_blocks:
            return
        self._was_idle = True
        try:
            self._admission.check()
            if (num_named := self._counts.num_named) >= 0 and self._ready.caches_prefixes:
                assert num_named == len(self._names), (
                    f"vLLM caches {num_named} blocks, of which {len(self._names)} are known"
                )
        except AssertionError as error:
            self.self_check = str(error)
            logger.error("self-check failed: %s", error)
        self._on_event(Idle())

    # -- calls of the handle -------------------------------------------------------------------------------------------

    def watch(self, sequence: Hosted, on_progress: OnProgress) -> None:
        """See `ServedSequence.watch`."""
        tables = (sequence.block_ids,)
        on_progress(KvProgress(sequence.num_computed_tokens, self._spec.num_layers, None, tables))
        self._watchers[sequence.key] = (*self._watchers.get(sequence.key, ()), on_progress)

    def insert(self, sequence: Hosted, first_token: int | None, num_tokens: int | None) -> None:
        """See `ServedSequence.insert`."""
        known = len(sequence.spec.token_ids)
        num_tokens = known if num_tokens is None else num_tokens
        sequence.num_inserted_tokens = num_tokens
        sequence.purpose = Purpose.GENERATE
        if first_token is not None:
            sequence.token_ids.append(first_token)
            sequence.num_skipped_tokens = 1
            if (finish := self._finish_reason(sequence)) is not None:
                name = self._admission.remove(sequence)
                self._by_name.pop(name, None)
                self._send(Abort(name))
                self._put(sequence, Generated(sequence.key, (), finish))
                return
        self._send(Insert(sequence.name, -1 if first_token is None else first_token, num_tokens))
        self._changed.set()

    def _finish_reason(self, sequence: Hosted) -> FinishReason | None:
        """Return the reason why a sequence ends with its last token; None: it continues."""
        params, last = sequence.spec.sampling, sequence.token_ids[-1]
        if last in params.stop_token_ids or (last in self._eos_token_ids and not params.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_tokens >= sequence.most_tokens else None

    def adopt(self, sequence: Hosted, num_tokens: int) -> None:
        """See `ServedSequence.adopt`."""
        self._send(Adopt(sequence.name, num_tokens))

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _watch(self) -> NoReturn:
        """Detect a host that hangs: it must report each step, and answer a ping while it is idle."""
        timeout_s = self._settings.step_timeout_s
        while True:
            await asyncio.sleep(timeout_s / PINGS)
            longest_s = self._fit.costs.prefill_s(self.max_step_tokens, 0, self.max_step_tokens)
            limit_s = max(timeout_s, HUNG * longest_s)
            now = time.monotonic()
            if now - self._owed_since_s > limit_s:
                self._lose_host(f"it has not answered within {limit_s:.0f} s (engine.step_timeout_s)")
            if not self._by_name:
                self._send(Ping())

    def _lose_host(self, reason: str) -> NoReturn:
        self.lose(f"vLLM's process, {self._host.pid}: {reason}")

    def lose(self, reason: str) -> NoReturn:
        """See `ServingEngine.lose`."""
        self._lost = DeviceLost(f"the device of the engine has failed: {reason}")
        in_step = LostInStep(f"the device of the engine has failed in a step of this request: {reason}")
        logger.critical("%s", self._lost)
        suspects = {sequence.key for sequence in self._by_name.values() if sequence.awaits_step}
        for key, queue in self._outputs.items():
            queue.put_nowait(in_step if key in suspects else self._lost)
        raise self._lost

    def close(self) -> None:
        """See `ServingEngine.close`."""
        self._opened.close()
        self._host.close()
