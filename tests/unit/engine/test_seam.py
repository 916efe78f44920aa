"""What the engine's face and its seam to a runner must allow, shown with engines and runners that do it."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.context import Context

from baton.costs import StepFit, StepSize
from baton.errors import ConfigError, TransferError, TransferRefused
from baton.messages import (
    DecodeRequest,
    FirstToken,
    PrefillRequest,
    Ticket,
)
from baton.scores import TokenScores
from decode_worker.service import DecodeService
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.core.outputs import Generated, Preempted
from engine.core.runner import (
    UNKNOWN_TOKEN,
    KVSpec,
    LayerGroup,
    OnLayerDone,
    PageOrder,
    StepInput,
    StepOutput,
    ignore_layer,
)
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose, Sequence
from engine.core.serving import ServingEngine
from engine.model.kv_cache import KVCache
from engine.testing import ArithmeticRunner, expected_tokens
from kvstore.transfer.protocol.plan import layout_of
from prefill_worker.service import PrefillService
from tests.unit.engine.core.test_engine import (
    drain,
    generated,
    is_empty,
    make_engine,
    numbers,
    step,
    write_prompt_kv,
)
from tests.unit.engine.core.test_engine import make_spec as engine_spec
from tests.unit.engine.grouped import GroupedRunner
from tests.unit.engine.scripted import BURSTS, ScriptedEngine
from tests.unit.engine.workers import SMALL, aggregated, serving, split
from tests.unit.kvstore.transfer.peers import CONFIG, engine_worker, make_spec

ROOT = Path(__file__).parents[3]
PROMPT = numbers(5, 100)


# -- an engine of another make serves in both modes -------------------------------------------------------------------


async def test_an_engine_that_bursts_and_preempts_serves_aggregated() -> None:
    engine = ScriptedEngine()
    async with asyncio.timeout(20), serving(engine, "alone") as worker:
        messages = await aggregated(worker, make_spec(PROMPT, 20))
    assert [token for message in messages for token in message.token_ids] == expected_tokens(PROMPT, 20)
    assert {len(message.token_ids) for message in messages} == set(BURSTS) - {0}
    assert [message.report is not None for message in messages] == [True] + [False] * (len(messages) - 1)
    assert engine.num_preemptions == 1
    assert engine.num_free == engine.num_at_first


@pytest.mark.parametrize("modes", ["scripted to ours", "ours to scripted", "both scripted"])
async def test_an_engine_whose_blocks_grow_and_whose_fences_are_its_own_serves_disaggregated(modes: str) -> None:
    """Each chunk has waited for the fence that made it ready: KV is in the cache from then on, and not before."""
    engines = ScriptedEngine(delay_s=0.02), ScriptedEngine()
    spec = make_spec(PROMPT, 20)
    async with (
        asyncio.timeout(20),
        serving(engines[0], "prefill") as prefill,
        serving(engines[1], "decode") as decode,
        engine_worker("ours", ArithmeticRunner(64), SMALL) as ours,
    ):
        workers = {"scripted to ours": (prefill, ours.context), "ours to scripted": (ours.context, decode)}
        assert await split(*workers.get(modes, (prefill, decode)), spec) == expected_tokens(PROMPT, 20)
        await ours.check_idle()
    for engine in engines:
        assert engine.num_free == engine.num_at_first
    if modes != "ours to scripted":
        assert [fence.num_waits > 0 for fence in engines[0].fences] == [True] * 5, (
            "the sender came before the step's end"
        )


@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (48, 16)])
@pytest.mark.parametrize("modes", ["scripted to ours", "ours to scripted", "both scripted"])
async def test_groups_of_unlike_blocks_one_of_them_opaque_serve_disaggregated(
    modes: str, sizes: tuple[int, int]
) -> None:
    """Blocks of pages are bridged where the two sides' differ; opaque ones, of 48 tokens, move whole."""
    ours_first = modes.startswith("ours")
    runners = [GroupedRunner(block_size=size) for size in sizes]
    engines = [ScriptedEngine(runner=GroupedRunner(block_size=size), delay_s=0.01) for size in sizes]
    spec = make_spec(PROMPT, 20)
    async with (
        asyncio.timeout(20),
        serving(engines[0], "prefill") as prefill,
        serving(engines[1], "decode") as decode,
        engine_worker("ours", runners[0 if ours_first else 1], SMALL) as ours,
    ):
        workers = {"scripted to ours": (prefill, ours.context), "ours to scripted": (ours.context, decode)}
        assert await split(*workers.get(modes, (prefill, decode)), spec) == expected_tokens(PROMPT, 20)
        await ours.check_idle()
    for engine in engines:
        assert engine.num_free == engine.num_at_first


@pytest.mark.parametrize(("num_held", "num_pulled"), [(100, 96), (60, 48)])
async def test_a_prefix_of_unlike_groups_is_pulled_in_blocks_that_are_whole_in_all_of_them(
    num_held: int, num_pulled: int
) -> None:
    async with (
        asyncio.timeout(20),
        engine_worker("here", GroupedRunner(), SMALL) as here,
        engine_worker("there", GroupedRunner(), SMALL) as there,
    ):
        spec = make_spec(PROMPT, 6)
        assert await there.generate(make_spec(PROMPT[:num_held], 3)) == expected_tokens(PROMPT[:num_held], 3)
        assert await here.kv.prefixes.fetch(spec, there.source(len(PROMPT)), 0.0, Context()) == num_pulled
        messages = await aggregated(here.context, spec)
        assert [token for message in messages for token in message.token_ids] == expected_tokens(PROMPT, 6)
        assert messages[0].report is not None
        assert messages[0].report.num_cached_tokens == num_pulled
        await here.check_idle()
        await there.check_idle()


async def test_opaque_blocks_of_another_kind_are_refused_by_name() -> None:
    async with (
        asyncio.timeout(20),
        serving(ScriptedEngine(runner=GroupedRunner(tag="vendor/1")), "prefill") as prefill,
        serving(ScriptedEngine(runner=GroupedRunner(tag="vendor/2")), "decode") as decode,
    ):
        with pytest.raises(TransferRefused, match="page order opaque vendor/1 at the source and opaque vendor/2 at"):
            await split(prefill, decode, make_spec(PROMPT, 4))


async def test_a_prompt_that_is_preempted_while_it_is_transferred_fails_this_kv_transfer_only() -> None:
    engine = ScriptedEngine()
    async with (
        asyncio.timeout(20),
        serving(engine, "prefill") as prefill,
        serving(ScriptedEngine(), "decode") as decode,
    ):
        spec = make_spec(PROMPT, 4)
        async with contextlib.aclosing(DecodeService(decode).decode(DecodeRequest(spec, True), Context())) as answers:
            ticket = await anext(answers)
            assert isinstance(ticket, Ticket)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("tests.unit.engine.scripted.ScriptedSequence._compute_prompt", _preempted_at_once)
                with pytest.raises(TransferError, match="lost its blocks while it was transferred: Preempted"):
                    await anext(PrefillService(prefill).prefill(PrefillRequest(spec, ticket), Context()))
    assert engine.num_free == engine.num_at_first


async def _preempted_at_once(self: Any) -> None:
    self._queue.put_nowait(Preempted(self._key))
    await asyncio.Event().wait()


async def test_a_ticket_may_leave_the_last_token_of_a_prompt_to_the_receiver() -> None:
    """It counts tokens of KV. The receiver computes the rest, and takes the first token that it is given."""
    async with (
        asyncio.timeout(20),
        engine_worker("prefill", ArithmeticRunner(64), CONFIG) as prefill,
        engine_worker("decode", ArithmeticRunner(64), CONFIG) as decode,
    ):
        spec = make_spec(PROMPT, 6)
        (first, *rest) = expected_tokens(PROMPT, 6)
        async with decode.loop.sequence(spec, Purpose.RECEIVE) as handle:
            reserved = await handle.next()
            num_tokens = len(PROMPT) - 1
            ticket = decode.kv.receiver.expect("t", num_tokens, 0, reserved.block_ids)  # type: ignore[union-attr]
            events = [e async for e in PrefillService(prefill.context).prefill(PrefillRequest(spec, ticket), Context())]
            assert isinstance(events[0], FirstToken)
            arrival = await decode.kv.receiver.wait_committed(ticket)
            await decode.kv.receiver.release(ticket)
            assert (arrival.num_tokens, arrival.first_token) == (num_tokens, first)
            handle.insert(arrival.first_token, arrival.num_tokens)
            tokens: list[int] = []
            while len(tokens) < len(rest):
                output = await handle.next()
                assert isinstance(output, Generated)
                tokens += output.token_ids
            assert tokens == rest
        for wrong in (len(PROMPT) - 2, len(PROMPT) + 1):
            with pytest.raises(TransferRefused, match=f"the ticket is for {wrong} tokens, the prompt has 100"):
                await anext(
                    PrefillService(prefill.context).prefill(
                        PrefillRequest(spec, dataclasses.replace(ticket, num_tokens=wrong)), Context()
                    )
                )


@pytest.mark.parametrize("decoding", ["ours", "scripted", "scripted, all but the last token"])
@pytest.mark.parametrize("draws_with_prompt", [True, False])
async def test_a_kv_transfer_needs_neither_the_last_tokens_kv_nor_a_first_token(
    decoding: str, draws_with_prompt: bool
) -> None:
    """The receiver computes the last token itself, and draws the first one where none comes."""
    leaves_one = decoding.endswith("last token")
    sender = ScriptedEngine(draws_with_prompt=draws_with_prompt)
    receiver = ScriptedEngine(computes_last_token=leaves_one, preempts=False)
    prompt = PROMPT[:97]  # the last token is in a block of its own, which does not come with the others
    spec = make_spec(prompt, 8)
    async with (
        asyncio.timeout(20),
        serving(sender, "prefill") as prefill,
        serving(receiver, "decode") as decode,
        engine_worker("ours", ArithmeticRunner(64), SMALL) as ours,
    ):
        worker = ours.context if decoding == "ours" else decode
        tickets: list[Ticket] = []
        assert await split(prefill, worker, spec, tickets.append) == expected_tokens(prompt, 8)
        assert [ticket.num_tokens for ticket in tickets] == [97 - leaves_one]
        await ours.check_idle()
    assert (sender.num_free, receiver.num_free) == (sender.num_at_first, receiver.num_at_first)


@pytest.mark.parametrize("with_state", [False, True])
async def test_a_receiver_asks_for_a_first_token_where_it_cannot_draw_one(with_state: bool) -> None:
    """A state comes with the last token in it, which can then neither be computed again nor left out."""
    async with (
        asyncio.timeout(20),
        engine_worker("prefill", ArithmeticRunner(64, with_state=with_state), CONFIG) as prefill,
        engine_worker("decode", ArithmeticRunner(64, with_state=with_state), CONFIG) as decode,
    ):
        spec = make_spec(PROMPT, 6)
        tickets: list[Ticket] = []
        tokens = await split(prefill.context, decode.context, spec, tickets.append)
        assert tokens == expected_tokens(PROMPT, 6, with_state=with_state)
        assert [ticket.force_first_token for ticket in tickets] == [with_state]
        less = PrefillRequest(spec, dataclasses.replace(tickets[0], num_tokens=len(PROMPT) - 1))
        if with_state:
            with pytest.raises(TransferRefused, match="the ticket is for 99 tokens, the prompt has 100"):
                await anext(PrefillService(prefill.context).prefill(less, Context()))


def test_there_may_be_no_first_token_to_go_on_from() -> None:
    """Then the last token is computed again, and the first one is drawn here."""
    engine = make_engine()
    prompt = numbers(3, 40)
    receiver = engine.add(engine_spec(prompt, 5), Purpose.RECEIVE, 0.0)
    drain(engine)
    write_prompt_kv(engine.runner.caches[0], receiver, (0,))
    assert engine.insert(receiver, None, 1.0) is None
    assert generated(drain(engine), receiver) == expected_tokens(prompt, 5)
    assert is_empty(engine)


# -- the step is a value ----------------------------------------------------------------------------------------------


def test_a_step_is_immutable_and_holds_nothing_that_changes() -> None:
    engine = make_engine()
    running = engine.add(engine_spec(numbers(1, 40), 20), Purpose.GENERATE, 0.0)
    step(engine)
    batch, _ = engine.schedule(0.0)
    before = pickle.dumps(batch)
    assert pickle.loads(before) == batch, "another process can have it"
    assert not any(isinstance(value, Sequence) for part in batch.parts for value in part)
    with pytest.raises(AttributeError):
        batch.parts[0].sample = False  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.copies = ()  # type: ignore[misc]
    engine.add(engine_spec(numbers(2, 40), name="later"), Purpose.GENERATE, 0.0)
    running.token_ids.append(7)
    engine.end(running)
    assert pickle.dumps(batch) == before, "the loop goes on while the runner reads it"


def test_the_step_after_next_can_be_planned_while_a_token_is_unknown() -> None:
    """The runner keeps the tokens that it has sampled, and fills them in."""

    class Ahead(ArithmeticRunner):
        def __init__(self) -> None:
            super().__init__(16)
            self.sampled: dict[int, int] = {}

        def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
            parts = tuple(
                part._replace(
                    token_ids=tuple(
                        self.sampled[part.sequence_key] if token == UNKNOWN_TOKEN else token for token in part.token_ids
                    )
                )
                for part in step.parts
            )
            output = super().execute(StepInput(parts, step.copies), on_layer_done)
            self.sampled |= {p.sequence_key: t[-1] for p, t in zip(parts, output.sampled_token_ids, strict=True) if t}
            return output

    runner = Ahead()
    engine = Engine(runner, SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, output_reservation=32))
    prompt = numbers(1, 20)
    engine.add(engine_spec(prompt, 5), Purpose.GENERATE, 0.0)
    first, _ = engine.schedule(0.0)
    (part,) = first.parts
    second = StepInput(
        (part._replace(token_ids=(UNKNOWN_TOKEN,), num_computed_tokens=20, num_kv_tokens=(21,), is_decoding=True),)
    )
    outputs = [runner.execute(planned) for planned in (first, second)]  # planned before the first one ran
    assert [output.sampled_token_ids for output in outputs] == [((token,),) for token in expected_tokens(prompt, 2)]


class BurstingRunner(ArithmeticRunner):
    """Yields none to three tokens a part: it computes on from its own, or says that it got less far."""

    def __init__(self, bursts: tuple[int, ...], num_blocks: int = 64) -> None:
        super().__init__(num_blocks)
        self._bursts = bursts
        self._turn = 0

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        once = super().execute(step, on_layer_done)
        sampled, computed, scores = [], [], []
        for part, (*first,), end in zip(step.parts, once.sampled_token_ids, once.num_computed_tokens, strict=True):
            self._turn += 1
            tokens = tuple(first)
            burst = self._bursts[self._turn % len(self._bursts)] if part.sample else 0
            room = len(part.block_ids[0]) * self.spec.block_size
            while tokens and len(tokens) < burst and end < room:
                on = part._replace(token_ids=tokens[-1:], num_computed_tokens=end, num_kv_tokens=(end + 1,))
                tokens += super().execute(StepInput((on,))).sampled_token_ids[0]
                end += 1
            if part.sample and not burst:
                tokens, end = (), end - 1
            sampled.append(tokens)
            computed.append(end)
            scores.append(TokenScores(tuple(-float(token) for token in tokens)))
        return StepOutput(sampled_token_ids=tuple(sampled), num_computed_tokens=tuple(computed), scores=tuple(scores))


@pytest.mark.parametrize("bursts", [(0, 3), (2,), (3, 1, 0, 0, 2)])
def test_a_step_yields_none_to_several_tokens_a_part_with_scores(bursts: tuple[int, ...]) -> None:
    engine = Engine(
        BurstingRunner(bursts), SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, output_reservation=0)
    )
    prompts = [numbers(number, 17 + number) for number in range(3)]
    added = [engine.add(engine_spec(p, 21, name=str(n)), Purpose.GENERATE, 0.0) for n, p in enumerate(prompts)]
    outputs = drain(engine)
    for prompt, sequence in zip(prompts, added, strict=True):
        assert generated(outputs, sequence) == expected_tokens(prompt, 21), "what ends it is the last one"
    for output in outputs:
        assert isinstance(output, Generated)
        assert tuple(output.scores.logprobs) == tuple(-float(token) for token in output.token_ids)
    assert max(len(o.token_ids) for o in outputs if isinstance(o, Generated)) == max(bursts)
    assert is_empty(engine)


async def test_a_runner_that_reports_no_layer_still_gives_one_report_a_step() -> None:
    class Silent(ArithmeticRunner):
        def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
            return super().execute(step)

    async with (
        asyncio.timeout(20),
        engine_worker("prefill", Silent(64), SMALL) as prefill,
        engine_worker("decode", ArithmeticRunner(64), SMALL) as decode,
    ):
        spec = make_spec(PROMPT, 6)
        assert await split(prefill.context, decode.context, spec) == expected_tokens(PROMPT, 6)


def test_costs_are_learned_from_sizes_and_times_alone() -> None:
    """An engine elsewhere tells tokens and seconds; no batch of ours is needed."""
    fit = StepFit()
    for number in range(1, 30):
        fit.observe(StepSize(num_new=100 * number), 0.01 + 1e-4 * 100 * number)
    assert fit.costs.s_per_token == pytest.approx(1e-4, rel=0.05)


# -- the shape of KV, and who may know what ----------------------------------------------------------------------------


def group(**changes: Any) -> LayerGroup:
    shape: dict[str, Any] = {
        "name": "all", "layers": (0,), "block_size": 16, "num_kv_heads": 1, "k_dim": 4, "v_dim": 4, "dtype": "float32",
    }  # fmt: skip
    return LayerGroup(**shape | changes)


def test_a_shape_that_an_engine_or_the_kv_transfer_cannot_do_is_refused_by_name_at_start() -> None:
    with pytest.raises(ValueError, match="block_size must be a multiple of 16, got 24"):
        group(block_size=24)
    with pytest.raises(ValueError, match=r"dtype must be one of float64, .*, got 'float12'"):
        group(dtype="float12")
    with pytest.raises(ValueError, match="an opaque page order needs a tag"):
        group(page_order=PageOrder.OPAQUE)
    opaque = KVSpec((group(page_order=PageOrder.OPAQUE, tag="vendor/1"),))
    by_token = KVSpec((group(page_order=PageOrder.BY_TOKEN),))
    for spec in (opaque, by_token):
        with pytest.raises(ValueError, match="must have pages of K and of V"):
            KVCache(spec, 4, 1)
    gaps = KVSpec((group(strides=(4096, 128)),))
    with pytest.raises(ValueError, match="without gaps"):
        KVCache(gaps, 4, 1)
    with pytest.raises(ConfigError, match="needs blocks without gaps; the blocks of group 'all' have gaps"):
        layout_of(gaps)


def test_nothing_reaches_through_the_engines_face() -> None:
    """Services, KV endpoint and member name the face and its values, never what is behind."""
    behind = {"runner", "scheduler", "pool", "block_table", "engine.engine", "_sequence"}
    folders = ("prefill_worker", "decode_worker", "kvstore", "worker")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 30
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in behind:
                owner = ast.unparse(node.value)
                assert not owner.endswith(("loop", "engine", "sequence", "handle")), f"{path}: {ast.unparse(node)}"
    loop: ServingEngine = EngineLoop(make_engine(), 8)  # ours stands behind the face, as mypy checks
    assert loop.keys() == []
    assert loop.spec.block_size == 16
    assert loop.load().running == 0
