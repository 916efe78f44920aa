"""Worker in virtual time: the production engine, scheduler and block pool with a model that only takes time.

Steps in which every sequence decodes and none waits are executed as one leap. It ends when a sequence needs another
block or, if the model has states or windows, when a sequence has filled one. Only an arrival can interrupt a leap; it
ends the leap after the current step.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from baton.cluster import Computes, WorkerLoad, WorkerState
from baton.kv_layout import KvLayout
from baton.messages import Adapter, FirstToken, NewTokens, SequenceSpec, Ticket
from baton.sampling import SamplingParams
from baton.scores import Sampled
from engine.core.block_pool import Stored
from engine.core.engine import Engine
from engine.core.image_store import ImageStore
from engine.core.outputs import Generated, Reserved
from engine.core.pool_sizes import PoolNeeds, table_sizes
from engine.core.runner import (
    ComputedStep,
    KVSpec,
    LayerGroup,
    OnLayerDone,
    StateSpec,
    StepInput,
    StepOutput,
    ignore_layer,
)
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose, Sequence
from kvstore.index import BlockEvent, Op
from lab.simulate.policy import WorkerView

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from kvstore.index import Mirror
    from lab.simulate.costs import CostModel
    from lab.traces.trace import TraceRequest

KEY_BYTES = 16
NO_LAYOUT = KvLayout(0, 1, ())
"""Layout of a cache without tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """Settings shared by all workers of a run."""

    num_blocks: int
    block_tokens: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    output_reservation: int = 512
    window: int = 0
    """Window of the layers that have one, in tokens; 0: there are none."""
    has_states: bool = False
    snapshot_tokens: int = 1024
    longest: int = 0
    """Tokens of the longest sequence, which a group with a window can hold; 0: as many as all blocks hold."""

    @property
    def spec(self) -> KVSpec:
        """KV layout of a model with such layers, in which sizes in bytes have no meaning."""
        group = LayerGroup(
            name="none",
            layers=(0,),
            block_size=self.block_tokens,
            num_kv_heads=1,
            k_dim=1,
            v_dim=0,
            dtype="uint8",
        )
        windows = (replace(group, name="window", layers=(1,), window=self.window),) if self.window else ()
        states = (StateSpec("state", (1,), "uint8"),) if self.has_states else ()
        return KVSpec((group, *windows), states)

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Number of blocks of each layer group and of rows of states, divided as an engine divides its memory."""
        longest = self.longest or self.num_blocks * self.block_tokens
        needs = PoolNeeds(max_num_seqs=self.max_num_seqs, max_tokens=longest, snapshot_tokens=self.snapshot_tokens)
        return table_sizes(self.spec, self.num_blocks, needs)

    def num_transferred(self, num_tokens: int, begins: SequenceOf[int] = (0, 0)) -> list[int]:
        """Return how many tokens of each layer group are transferred with a prefix: of a window, its blocks.

        Args:
            begins: number of leading tokens that the receiver has, by layer group.
        """
        firsts = (group.first_block(num_tokens) * group.block_size for group in self.spec.groups)
        return [max(0, num_tokens - max(first, begin)) for first, begin in zip(firsts, begins, strict=False)]


class CostlyRunner:
    """Model without tensors: the next token is the sequence's own next number."""

    runs_ahead = False
    images: ImageStore | str = "the simulator computes no images"
    token_s = 0.0
    max_adapters = 0
    computes = Computes()
    expert_tokens = ()
    num_start_tokens = 0
    canvas_length = 0

    def __init__(self, shape: WorkerShape) -> None:
        self.spec = shape.spec
        self.num_blocks = shape.table_sizes
        self.caches = ()
        self.name = self.sampler = "simulated"
        self.max_model_len = shape.num_blocks * shape.block_tokens
        self.vocab_size = sys.maxsize
        self.eos_token_ids: frozenset[int] = frozenset()

    def prepare(self, params: SamplingParams) -> None:
        """Do nothing: the outputs are not read."""

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        """See `Runner.execute`."""
        return StepOutput.one_each(step, Sampled([part.token_ids[-1] + 1 for part in step.parts if part.sample]))

    def launch(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> ComputedStep:
        """See `Runner.launch`."""
        return ComputedStep(self.execute(step, on_layer_done))

    def check_adapter(self, path: str) -> NoReturn:
        """Refuse: nothing is computed here."""
        raise NotImplementedError

    def read_adapter(self, adapter: Adapter) -> NoReturn:
        """Refuse: there are no slots."""
        raise NotImplementedError

    def recover(self) -> None:
        """Do nothing: there is no device."""

    def close(self) -> None:
        """Do nothing: no process was started."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """Steps in progress: `num_steps` equal ones from `began_s` on."""

    input: StepInput
    sequences: dict[int, Sequence]
    """Sequences of the step, by key."""
    began_s: float
    step_s: float
    num_steps: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens that each step computes."""
        return self.input.num_scheduled_tokens

    @property
    def ends_s(self) -> float:
        return self.began_s + self.num_steps * self.step_s


@dataclass(frozen=True, slots=True)
class Message:
    """A worker's message to the router: a ticket, the first token of a prompt whose blocks are held, or tokens."""

    sequence: Sequence
    event: Ticket | FirstToken | NewTokens
    interval_s: float = 0.0
    """Time between two of the tokens, and from the one before."""


class SimulatedWorker:
    """Simulated worker. Time is an argument: the owner reads `ends_s` after every call, and calls `finish` and `begin`
    then.

    Args:
        mirror: index of the workers' blocks, which the worker keeps up to date; None: there is none.
    """

    def __init__(self, index: int, shape: WorkerShape, costs: CostModel, mirror: Mirror | None = None) -> None:
        self.index = index
        self._mirror = mirror
        self._num_events = 0
        self.shape = shape
        self.costs = costs
        limits = SchedulerLimits(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            output_reservation=shape.output_reservation,
            snapshot_tokens=shape.snapshot_tokens,
        )
        self.engine = Engine(CostlyRunner(shape), limits)
        self.num_requests = 0
        self.queued_tokens = 0
        """Uncached prompt tokens of sequences that are here and not computed."""
        self.reserved_tokens = 0
        self.computed_tokens = 0
        """Prompt tokens computed since the start, including those recomputed after a preemption."""
        self.busy_s = 0.0
        self._stepped_tokens = 0
        self._step: _Step | None = None
        self._resumes_anywhere = shape.spec.resumes_anywhere

    @property
    def ends_s(self) -> float | None:
        """Time at which the current step ends; None: the worker is idle."""
        return self._step.ends_s if self._step else None

    def add(self, spec: SequenceSpec, purpose: Purpose, keys: SequenceOf[bytes], now: float) -> Sequence:
        """Queue a sequence; `keys` are those of its prompt's full blocks. The owner must call `begin` if the worker is
        idle.
        """
        sequence = self.engine.add(spec, purpose, now)
        sequence.block_keys = list(keys)
        self.cut_short(now)
        return sequence

    def num_cached_tokens(self, keys: SequenceOf[bytes], num_tokens: int) -> int:
        """Return how many leading tokens of a prompt the prefix cache holds; the last token is always computed."""
        usable = keys[: (num_tokens - 1) // self.shape.block_tokens]
        return self.engine.num_cached_tokens(usable)

    def insert(self, sequence: Sequence, now: float) -> bool:
        """Insert a reserved sequence whose KV has arrived. Return whether its first token was its last."""
        self.cut_short(now)
        is_finished = self.engine.insert(sequence, sequence.token_ids[-1] + 1, now) is not None
        self._publish()
        return is_finished

    def adopt(self, sequence: Sequence, num_tokens: int) -> None:
        """Make tokens of a reserved sequence, whose KV has arrived, computed ones."""
        self.engine.adopt(sequence, num_tokens)
        self._publish()

    def end(self, sequence: Sequence) -> None:
        self.engine.end(sequence)
        self._publish()

    def finish(self, now: float) -> list[Message]:
        """End the step that is due, if any, and return its tokens."""
        if (step := self._step) is None:
            return []
        assert now >= step.ends_s - 1e-9
        self._step = None
        return self._finish(step, now)

    def begin(self, now: float) -> list[Message]:
        """Start the next step, if there is work. Return tickets for the sequences that got blocks to receive KV."""
        assert self._step is None, "one step at a time"
        step, outputs = self.engine.schedule(now)
        self._publish()
        if step:
            self._step = self._begin(step, now)
        sequences = self.engine.sequences
        return [self._ticket(sequences[output.sequence_key], output) for output in outputs if type(output) is Reserved]

    def load(self, now: float, state: WorkerState) -> WorkerLoad:
        """Return the load that the worker would report."""
        load, busy_s, num_tokens = self.engine.load(), self.busy_s, self._stepped_tokens
        if (step := self._step) is not None:
            busy_s += min(now, step.ends_s) - step.began_s
            num_tokens += step.num_tokens * int((now - step.began_s) / step.step_s)
        return WorkerLoad(
            state=state,
            running=load.running,
            waiting=load.waiting,
            queued_tokens=load.queued_tokens,
            blocks=load.blocks,
            state_rows=load.state_rows,
            preemptions=load.preemptions,
            costs=load.costs,
            busy_s=busy_s,
            computed_tokens=num_tokens,
        )

    def view(self, keys: SequenceOf[bytes], request: TraceRequest) -> WorkerView:
        """Return a policy's view of the worker when the request is placed."""
        engine, blocks = self.engine, self.engine.blocks
        return WorkerView(
            index=self.index,
            num_cached_tokens=self.num_cached_tokens(keys, request.num_prompt_tokens),
            queued_tokens=self.queued_tokens,
            reserved_tokens=self.reserved_tokens,
            num_requests=self.num_requests,
            num_waiting=engine.num_waiting,
            used_blocks=blocks.in_use,
            num_blocks=blocks.total,
            tokens_per_s=self.costs.tokens_per_s,
            costs=engine.costs,
            chunk_tokens=self.shape.max_num_batched_tokens,
            block_tokens=self.shape.block_tokens,
        )

    def _begin(self, step: StepInput, now: float) -> _Step:
        everybody = not self.engine.num_waiting and len(step.parts) == self.engine.num_running
        leap = self.shape.max_num_batched_tokens if everybody else 1
        sequences = {part.sequence_key: self.engine.sequences[part.sequence_key] for part in step.parts}
        for part in step.parts:
            sequence = sequences[part.sequence_key]
            if part.is_decoding:
                room = sequence.num_block_tokens - part.end
                leap = min(leap, 1 + room, sequence.spec.max_tokens - sequence.num_output_tokens)
                if not self._resumes_anywhere:  # snapshots are taken, and windows passed, after whole blocks
                    leap = min(leap, 1 + -part.end % self.shape.block_tokens)
            else:
                leap = 1
                self.computed_tokens += part.num_scheduled_tokens
        size = step.size()
        step_s = self.costs.step_s(size)
        self.engine.learn(size, step_s)
        return _Step(input=step, sequences=sequences, began_s=now, step_s=step_s, num_steps=leap)

    def _ticket(self, sequence: Sequence, reserved: Reserved) -> Message:
        ticket = Ticket(
            transfer_id=sequence.sequence_id,
            generation=0,
            decode_worker_id=str(self.index),
            incarnation="",
            kv_address="",
            num_tokens=reserved.num_tokens,
            skip_tokens=reserved.num_cached_tokens,
            wire_compat="",
            layout=NO_LAYOUT,
            begins=reserved.begins,
        )
        return Message(sequence, ticket)

    def _finish(self, step: _Step, now: float) -> list[Message]:
        self.busy_s += step.num_steps * step.step_s
        self._stepped_tokens += step.num_steps * step.num_tokens
        messages: list[Message] = []
        for output in self.engine.commit(step.input, self._executed(step), now):
            assert isinstance(output, Generated)
            sequence, reason, report = step.sequences[output.sequence_key], output.finish_reason, output.report
            if sequence.purpose is Purpose.PREFILL:
                assert report is not None
                messages.append(Message(sequence, FirstToken(output.token_ids[0], reason, report)))
            else:
                new = NewTokens(token_ids=output.token_ids, finish_reason=reason, report=report)
                messages.append(Message(sequence, new, step.step_s))
        self._publish()
        return messages

    def _publish(self) -> None:
        """Pass the changes of the cache on to the mirror."""
        changes = self.engine.take_block_events()
        if self._mirror is None:
            return
        for kind, same in itertools.groupby(changes, type):
            self._num_events += 1
            event = BlockEvent(
                worker_id=str(self.index),
                epoch=1,
                seq=self._num_events,
                op=Op.STORED if kind is Stored else Op.REMOVED,
                keys=tuple([change.key for change in same]),
            )
            self._mirror.apply(event)

    def _executed(self, step: _Step) -> StepOutput:
        """Return the model's output for all steps of a leap: as many tokens for each sequence."""
        one = self.engine.runner.execute(step.input)
        num_more = step.num_steps - 1
        if not num_more:
            return one
        return StepOutput(
            sampled_token_ids=tuple([tuple(range(n, n + step.num_steps)) for (n,) in one.sampled_token_ids]),
            num_computed_tokens=tuple([num_tokens + num_more for num_tokens in one.num_computed_tokens]),
        )

    def cut_short(self, now: float) -> None:
        """End a leap of many steps after the current one."""
        if self._step is not None and self._step.num_steps > 1:
            num_begun = int((now - self._step.began_s) / self._step.step_s) + 1
            self._step.num_steps = min(self._step.num_steps, num_begun)


def key_of(block_id: int) -> bytes:
    """Return the key of a trace's block."""
    return block_id.to_bytes(KEY_BYTES, "little", signed=True)
