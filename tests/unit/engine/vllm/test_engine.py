"""The engine over a fake vLLM: properties that the contract suite does not require of every engine."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baton.costs import StepFit, StepSize
from baton.errors import InvalidRequest, TransferRefused, Unsupported
from baton.hypotheses import NO_HYPOTHESES
from baton.messages import SequenceSpec
from baton.sampling import FinishReason
from baton.structure import StructuredOutputs
from engine.core.block_pool import Removed, Stored
from engine.core.outputs import Admitted, Generated, KvProgress, Output, Preempted, Reserved
from engine.core.sequence import Purpose
from engine.testing import expected_tokens, modulus
from engine.vllm.engine import VllmEngine
from engine.vllm.messages import Allocated, Counts, LayerDone, Pinned, Stepped
from tests.support.builders import registered_adapter, sequence_spec, step_costs
from tests.support.fake_vllm.hosted import LOG_OF_BEST, REFUSED, SLOWLY_COMPILED, UNCOMPILED, UNDRAWN
from tests.support.waiting import until
from tests.unit.engine.contract.subjects import SOON_S, Subject, read
from tests.unit.engine.vllm.hosts import BLOCK_SIZE, Hosts

PROMPT = [5 + 3 * i % 400 for i in range(100)]


def spec_of(prompt: Sequence[int], num_tokens: int = 8, name: str = "r", **values: Any) -> SequenceSpec:
    return sequence_spec(prompt, name, max_tokens=num_tokens, **values)


async def all_of(engine: VllmEngine, spec: SequenceSpec) -> tuple[list[int], list[Output]]:
    """The tokens of an answer, and all outputs."""
    outputs: list[Output] = []
    async with asyncio.timeout(SOON_S), engine.sequence(spec, Purpose.GENERATE) as handle:
        while not (outputs and isinstance(outputs[-1], Generated) and outputs[-1].finish_reason):
            outputs.append(await handle.next())
    return [token for each in outputs if isinstance(each, Generated) for token in each.token_ids], outputs


def its(subject: Subject) -> VllmEngine:
    assert isinstance(subject.engine, VllmEngine)
    return subject.engine


# -- description ------------------------------------------------------------------------------------------------------


async def test_its_description_is_vllms(hosts: Hosts) -> None:
    ready = {"quantization": "awq", "kv_dtype": "fp8_e4m3", "attention": "a" * 100}
    engine = hosts.engine({"ready": ready}, num_blocks=12, max_model_len=100)
    assert (engine.max_model_len, engine.max_step_tokens, engine.max_adapters) == (100, 64, 0)
    computes = engine.computes
    assert (computes.weights, computes.kv_dtype, computes.dtype, computes.gpu) == ("awq", "fp8_e4m3", "int64", "")
    assert computes.attention == "a" * 64, "a lease has no room for more"
    assert engine.caches[0].groups[0].shape == (2, 13, 2 * BLOCK_SIZE)
    assert not engine.takes_images
    assert engine.image_placeholder is None
    assert engine.is_idle


async def test_a_pool_limits_the_longest_sequence(hosts: Hosts) -> None:
    """vLLM's own limit ignores the blocks that other groups of layers take from the pool."""
    groups = [["full", 2, BLOCK_SIZE, 0], ["state", 2, 512, 0]]
    behaviour = {"ready": {"groups": groups}}
    assert hosts.engine(behaviour, num_blocks=12).max_model_len == 10 * BLOCK_SIZE
    assert hosts.engine(num_blocks=12).max_model_len == 12 * BLOCK_SIZE


async def test_its_load_counts_what_runs_waits_and_is_cached(hosts: Hosts) -> None:
    subject = hosts.subject(num_blocks=10, max_num_seqs=1)
    async with subject.running() as engine:
        await subject.answer(spec_of(PROMPT, 2))
        await until(lambda: engine.load().blocks.cached == 3, SOON_S)
        blocks = engine.load().blocks
        assert (blocks.total, blocks.free, blocks.cached, blocks.in_use) == (10, 7, 3, 0)
        async with (
            engine.sequence(spec_of(PROMPT[1:], 1), Purpose.PREFILL) as held,
            engine.sequence(spec_of(PROMPT), Purpose.GENERATE) as waits,
        ):
            await held.next()
            await held.next()
            load = engine.load()
            assert (load.running, load.waiting, load.queued_tokens) == (1, 1, len(PROMPT))
            assert load.blocks.in_use == 4
            assert waits.take_ready() == []
        assert load.computed_tokens >= 100 + 1 + 99
        assert load.busy_s > 0


# -- answers -----------------------------------------------------------------------------------------------------------


async def test_log_probabilities_come_with_each_token(hosts: Hosts) -> None:
    subject = hosts.subject()
    async with subject.running():
        _, outputs = await subject.answer(spec_of(PROMPT[:5], 3, logprobs=2, prompt_logprobs=1))
    tokens = subject.expected(PROMPT[:5], 3)
    for token, output in zip(tokens, outputs, strict=True):
        assert list(output.token_ids) == [token]
        assert list(output.scores.logprobs) == [LOG_OF_BEST]
        assert list(output.scores.top_ids) == [token, token + 1]
        assert list(output.scores.top_logprobs) == [LOG_OF_BEST, LOG_OF_BEST - 0.1]
    assert outputs[0].report is not None
    assert list(outputs[0].report.prompt_scores.top_ids) == PROMPT[1:5]


async def test_an_answer_ends_with_a_token_of_the_model_unless_it_ignores_it(hosts: Hosts) -> None:
    """Token 0 is the model's end-of-sequence token. It follows a prompt whose sum is a multiple of the modulus."""
    subject = hosts.subject()
    prime = modulus(49152)
    ends = [prime - 2 * 20_000, 20_000]
    async with subject.running():
        stopped, outputs = await subject.answer(spec_of(ends, 4, ignore_eos=False))
        ignored, _ = await subject.answer(spec_of(ends, 4))
    assert (stopped, outputs[-1].finish_reason) == ([0], FinishReason.STOP)
    assert ignored == subject.expected(ends, 4)


async def test_a_late_answer_is_preempted_for_an_earlier_one_and_both_are_the_models(hosts: Hosts) -> None:
    """Two answers of four blocks do not fit into six; vLLM itself never preempts, because the worker does."""
    subject = hosts.subject(num_blocks=6, output_reservation=16)
    engine = its(subject)
    prompts = [PROMPT[number : 33 + number] for number in range(2)]
    async with subject.running():
        specs = [spec_of(prompt, 70, f"r{number}") for number, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*(all_of(engine, spec) for spec in specs))
    num_preempted = [sum(isinstance(output, Preempted) for output in outputs) for _, outputs in answers]
    assert [tokens for tokens, _ in answers] == [subject.expected(prompt, 70) for prompt in prompts]
    assert num_preempted[0] == 0
    assert num_preempted[1] >= 1
    assert engine.load().preemptions == sum(num_preempted)


async def test_many_answers_in_a_small_pool_evict_and_preempt_and_are_the_models(hosts: Hosts) -> None:
    subject = hosts.subject(num_blocks=9, output_reservation=16, max_waiting=32)
    engine = its(subject)
    prompts = [[*PROMPT[: 40 * (number % 2)], number + 1, *PROMPT[: 9 * number]] for number in range(10)]
    async with subject.running():
        specs = [spec_of(prompt, 40 + 17 * (n % 4), f"r{n}", priority=n % 3 == 0) for n, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*(all_of(engine, spec) for spec in specs))
        for number, (tokens, _) in enumerate(answers):
            assert tokens == subject.expected(prompts[number], len(tokens)), number
            assert len(tokens) == 40 + 17 * (number % 4)
        num_preempted = sum(isinstance(output, Preempted) for _, outputs in answers for output in outputs)
        assert engine.load().preemptions == num_preempted > 0
        assert any(isinstance(change, Removed) for change in subject.events.changes)
        stored = Counter(change.key for change in subject.events.changes if isinstance(change, Stored))
        stored.subtract(change.key for change in subject.events.changes if isinstance(change, Removed))
        assert sorted(stored.elements()) == sorted(engine.keys())


class AsGiven(StepFit):
    """Fixed step costs of a second per token."""

    def __init__(self) -> None:
        super().__init__(step_costs(s_per_token=1.0))

    def observe(self, size: StepSize, took_s: float) -> None:
        pass


async def test_a_worker_that_is_late_finds_vllm_within_its_reservations(hosts: Hosts) -> None:
    """Beyond them vLLM would take blocks of others, and preempt when there are none."""
    subject = hosts.subject(num_blocks=8, output_reservation=16)
    prompts = [PROMPT[number : 33 + number] for number in range(4)]

    async def be_late() -> None:
        while True:
            await asyncio.sleep(0.005)
            asyncio.get_running_loop().call_soon(time.sleep, 0.02)

    async with subject.running() as engine:
        being_late = asyncio.create_task(be_late())
        specs = [spec_of(prompt, 60, f"r{number}") for number, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*(all_of(its(subject), spec) for spec in specs))
        being_late.cancel()
        assert [tokens for tokens, _ in answers] == [subject.expected(prompt, 60) for prompt in prompts]
        num_preempted = sum(isinstance(output, Preempted) for _, outputs in answers for output in outputs)
        assert engine.load().preemptions == num_preempted, "vLLM itself preempts none"


async def test_steps_are_short_while_an_answer_has_an_objective(hosts: Hosts) -> None:
    """A prompt gets an eighth of a step and its own place at a time then, and whole steps without one.

    What a step costs is given: a measured one may read weights for so long that a whole prompt is computed meanwhile.
    """
    for itl_s, least, most in ((1e-6, 1, 9), (float("inf"), 63, 64)):
        subject = hosts.subject()
        its(subject)._fit = AsGiven()
        told: list[KvProgress] = []
        async with (
            subject.running() as engine,
            asyncio.timeout(SOON_S),
            engine.sequence(spec_of(PROMPT[:5], 500, itl_s=itl_s), Purpose.GENERATE) as decoding,
        ):
            await decoding.next()
            async with engine.sequence(spec_of(PROMPT, 1), Purpose.PREFILL) as handle:
                assert isinstance(await handle.next(), Admitted)
                handle.watch(told.append)
                assert isinstance(await handle.next(), Generated)
        ends = [0, *dict.fromkeys(progress.num_tokens for progress in told)]
        parts = [end - begin for begin, end in pairwise(ends)]
        assert sum(parts) == len(PROMPT)
        assert least <= max(parts) <= most


# -- structures --------------------------------------------------------------------------------------------------------


@pytest.fixture
def structured(hosts: Hosts, model_dir: Path) -> Subject:
    """A model with texts, so that structures can be compiled."""
    config = hosts.config()
    shutil.copy(model_dir / "tokenizer.json", config.model.path)
    return Subject(engine=hosts.started(config), expected=expected_tokens)


def choosing(choice: str, prompt: Sequence[int] = PROMPT, **values: Any) -> SequenceSpec:
    structure = StructuredOutputs(choice=(choice, "another"))
    return spec_of(prompt, 4, ignore_eos=False, structured_outputs=structure, **values)


async def test_a_structure_is_compiled_beside_the_steps_of_others(structured: Subject) -> None:
    async with structured.running() as engine:
        async with engine.sequence(choosing(SLOWLY_COMPILED), Purpose.GENERATE) as slow:
            for number in range(3):
                assert (await structured.answer(spec_of(PROMPT[number:], 5)))[0]
            assert slow.take_ready() == [], "it takes a second"
            tokens, _ = await read(slow)
        assert tokens == structured.expected(PROMPT, 4)


async def test_a_structure_that_vllm_cannot_compile_fails_its_answer_alone(structured: Subject) -> None:
    async with structured.running():
        beside = asyncio.create_task(structured.answer(spec_of(PROMPT[2:], 40)))
        with pytest.raises(InvalidRequest, match="ValueError: there is no such structure"):
            await structured.answer(choosing(UNCOMPILED))
        assert (await beside)[0] == structured.expected(PROMPT[2:], 40)


async def test_who_leaves_while_a_structure_is_compiled_is_never_computed(structured: Subject) -> None:
    async with structured.running() as engine:
        async with engine.sequence(choosing(SLOWLY_COMPILED), Purpose.GENERATE):
            await until(lambda: engine.load().running == 1, SOON_S)
        await structured.is_empty()
        assert (await structured.answer(choosing(SLOWLY_COMPILED, PROMPT[1:])))[0] == structured.expected(PROMPT[1:], 4)
        assert engine.load().computed_tokens == len(PROMPT[1:]) + 3


async def test_a_structure_that_the_worker_cannot_compile_is_not_sent(structured: Subject, hosts: Hosts) -> None:
    async with structured.running() as engine:
        wrong = spec_of(PROMPT, 4, ignore_eos=False, structured_outputs=StructuredOutputs(regex="("))
        with pytest.raises(InvalidRequest):
            await structured.answer(wrong)
        assert engine.load().waiting == 0
    without_texts = hosts.subject()
    async with without_texts.running():
        with pytest.raises(InvalidRequest, match="the worker's model has no tokenizer"):
            await without_texts.answer(choosing("one"))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "reason"), [(REFUSED, "vLLM refuses this prompt"), (UNDRAWN, "no token can be drawn")]
)
async def test_a_sequence_that_vllm_refuses_fails_alone(hosts: Hosts, token: int, reason: str) -> None:
    subject = hosts.subject()
    async with subject.running() as engine:
        beside = asyncio.create_task(subject.answer(spec_of(PROMPT, 60)))
        with pytest.raises(InvalidRequest, match=reason):
            await subject.answer(spec_of([3, token, 5]))
        assert (await beside)[0] == subject.expected(PROMPT, 60)
        assert engine.load().running == 0


async def test_what_vllm_is_not_asked_for_is_refused_by_name(hosts: Hosts) -> None:
    subject = hosts.subject()
    adapter = registered_adapter().adapter
    async with subject.running() as engine:
        refused: dict[str, dict[str, Any]] = {
            "use_beam_search is not supported": {"use_beam_search": True, "n": 2},
            "logprob_token_ids is not supported": {"logprob_token_ids": (7, 2)},
            "holds no adapters": {"adapter": adapter},
        }
        for message, values in refused.items():
            with pytest.raises(Unsupported, match=message):
                await subject.answer(spec_of(PROMPT, **values))
        with pytest.raises(Unsupported, match="takes no images"):
            await engine.keep_images([b"image"], b"seed")
        with pytest.raises(Unsupported, match="holds no adapters"):
            await engine.check_adapter("/adapters/one")
        named: list[dict[str, Any]] = [{"stop_token_ids": (3, 49152)}, {"allowed_token_ids": (49152,)}]
        for values in named:
            with pytest.raises(InvalidRequest, match="token id 49152 is outside the model's vocabulary"):
                await subject.answer(sequence_spec(PROMPT, **values))
        assert engine.hypotheses(spec_of(PROMPT)) == NO_HYPOTHESES
        async with engine.sequence(spec_of(PROMPT, 50), Purpose.GENERATE) as handle:
            await handle.next()
            with pytest.raises(TransferRefused, match="only the blocks of a prompt that is computed for another"):
                await handle.pin()


async def test_without_shared_memory_a_worker_exchanges_no_kv(hosts: Hosts) -> None:
    subject = hosts.subject({"ready": {"memory": None}})
    async with subject.running() as engine:
        for purpose in (Purpose.PREFILL, Purpose.RECEIVE):
            with pytest.raises(TransferRefused, match=r"exchanges no KV; set router.mode to aggregated"):
                async with engine.sequence(spec_of(PROMPT), purpose):
                    pass
        assert (await subject.answer(spec_of(PROMPT, 8)))[0] == subject.expected(PROMPT, 8)
        assert engine.spec.num_layers == 0
        pin = await engine.pin_prefix(spec_of(PROMPT).block_keys(PROMPT))
        assert (pin.block_ids, pin.num_tokens) == (((),), 0)
        engine.unpin(pin)


# -- KV that arrives ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def copied(engine: VllmEngine, sent: SequenceSpec, received: SequenceSpec, num_blocks: int) -> Any:
    """A RECEIVE sequence, into whose first blocks the KV of a PREFILL sequence was copied."""
    async with (
        engine.sequence(sent, Purpose.PREFILL) as source,
        engine.sequence(received, Purpose.RECEIVE) as target,
    ):
        told: list[KvProgress] = []
        admitted, reserved = await source.next(), await target.next()
        assert isinstance(admitted, Admitted)
        assert isinstance(reserved, Reserved)
        source.watch(told.append)
        assert isinstance(await source.next(), Generated)
        assert told[-1].block_ids is not None
        rows = engine.caches[0].groups[0]
        rows[:, list(reserved.block_ids[0][:num_blocks])] = rows[:, list(told[-1].block_ids[0][:num_blocks])]
        yield target


async def test_kv_that_a_step_computes_for_another_prompt_is_there_once_the_step_is_reported(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM counts blocks as cached that another sequence of the same step computes, before the step computes them."""
    engine, told = hosts.engine(), list[KvProgress]()
    monkeypatch.setattr(engine._host, "send", lambda message: None)
    async with engine.sequence(spec_of(PROMPT, 1), Purpose.PREFILL) as handle:
        (sequence,) = engine._admission.advance(0.0).admitted
        engine._by_name[sequence.name] = sequence
        engine._handle(Allocated(sequence.name, [1, 2, 3, 4], 96), 0.0)
        assert await handle.next() == Admitted(sequence.key, ((1, 2, 3, 4),), 96)
        handle.watch(told.append)
        assert told[-1].num_tokens == 0
        engine._handle(LayerDone(1, [(sequence.name, 100)]), 0.0)
        assert (told[-1].num_tokens, told[-1].num_layers) == (100, 1)
        ends = [(sequence.name, 100)]
        engine._handle(Stepped(0.1, (0, 0, 0, 0), [], [], [], ends, Counts(60, 0, 0, 0)), 0.0)
        assert (told[-1].num_tokens, told[-1].num_layers) == (100, engine.spec.num_layers)


TENANT: dict[str, Any] = {"cache_seed": b"another tenant's"}


@pytest.mark.parametrize(
    ("num_blocks", "first_token", "num_tokens"),
    [(4, None, None), (4, 77, None), (3, 77, 96), (3, None, 98), (1, 77, 40), (0, None, 0)],
)
async def test_received_kv_is_continued_and_what_is_missing_is_computed(
    hosts: Hosts, num_blocks: int, first_token: int | None, num_tokens: int | None
) -> None:
    subject = hosts.subject()
    received = spec_of(PROMPT, 9, **TENANT)
    async with (
        subject.running(),
        asyncio.timeout(SOON_S),
        copied(its(subject), spec_of(PROMPT, 1), received, num_blocks) as target,
    ):
        target.insert(first_token, num_tokens)
        tokens, _ = await read(target)
    if first_token is None:
        assert tokens == subject.expected(PROMPT, 9)
    else:
        assert tokens == subject.expected([*PROMPT, first_token], 8)


async def test_a_received_prompt_has_no_scores(hosts: Hosts) -> None:
    """The worker that computes it reports them. Routers send both workers the same parameters."""
    subject = hosts.subject()
    sent, received = spec_of(PROMPT, 1, prompt_logprobs=1), spec_of(PROMPT, 9, prompt_logprobs=1, **TENANT)
    async with (
        subject.running(),
        asyncio.timeout(SOON_S),
        copied(its(subject), sent, received, 4) as target,
    ):
        target.insert(None)
        tokens, outputs = await read(target)
    assert tokens == subject.expected(PROMPT, 9)
    assert all(output.report is None for output in outputs)


async def test_received_kv_that_is_taken_back_before_its_first_step_loses_no_token(hosts: Hosts) -> None:
    """vLLM reports the given first token only to who inserted it: later it is a token of the prompt."""
    subject = hosts.subject(num_blocks=8, output_reservation=16)
    prompt = PROMPT[:48]
    expected = subject.expected(prompt, 30)
    async with subject.running() as engine, asyncio.timeout(SOON_S), contextlib.AsyncExitStack() as others:
        held = await others.enter_async_context(engine.sequence(spec_of([*PROMPT, *PROMPT[1:81]], 1), Purpose.PREFILL))
        assert isinstance(await held.next(), Admitted)
        async with engine.sequence(spec_of(prompt, 30, **TENANT), Purpose.RECEIVE) as target:
            assert isinstance(await target.next(), Reserved)
            target.insert(expected[0], 0)
            assert isinstance(await target.next(), Preempted), "there is no block for its growth"
            await others.aclose()
            tokens, _ = await read(target)
        assert tokens == expected[1:]


async def test_kv_of_another_prompt_or_none_changes_the_answer(hosts: Hosts) -> None:
    """The model reads the blocks; otherwise the tests above would pass in any case."""
    subject = hosts.subject()
    async with subject.running(), asyncio.timeout(SOON_S):
        for sent, num_blocks in ((PROMPT, 0), (PROMPT, 3), ([*PROMPT[:50], 1, *PROMPT[51:]], 4)):
            other = spec_of([9, *PROMPT[1:]], 9, **TENANT)
            async with copied(its(subject), spec_of(sent, 1), other, num_blocks) as target:
                target.insert(None, None)
                tokens, _ = await read(target)
            assert tokens != subject.expected(other.token_ids, 9)


async def test_a_first_token_that_ends_the_answer_ends_it_without_a_step(hosts: Hosts) -> None:
    subject = hosts.subject()
    cases: list[tuple[dict[str, Any], int, FinishReason]] = [
        ({"stop_token_ids": (7,)}, 7, FinishReason.STOP),
        ({"ignore_eos": False}, 0, FinishReason.STOP),
        ({"max_tokens": 1}, 9, FinishReason.LENGTH),
    ]
    async with subject.running() as engine, asyncio.timeout(SOON_S):
        for values, token, reason in cases:
            spec = sequence_spec(PROMPT, **values)
            async with engine.sequence(spec, Purpose.RECEIVE) as handle:
                assert isinstance(await handle.next(), Reserved)
                handle.insert(token)
                ended = await handle.next()
            assert isinstance(ended, Generated)
            assert (ended.token_ids, ended.finish_reason) == ((), reason)
        assert engine.load().computed_tokens == 0


async def test_a_received_prefix_stays_cached(hosts: Hosts) -> None:
    """A received prefix is cached up to its last whole block, and the tenant's next prompt reuses it."""
    subject = hosts.subject()
    async with subject.running() as engine, asyncio.timeout(SOON_S):
        prefix = spec_of(PROMPT, 9, **TENANT).prefix(96)
        async with copied(its(subject), spec_of(PROMPT, 1), prefix, 3) as target:
            target.adopt(64)
        tokens, outputs = await subject.answer(spec_of(PROMPT, 9, **TENANT))
        assert tokens == subject.expected(PROMPT, 9)
        report = next(output.report for output in outputs if output.report)
        assert report.num_cached_tokens == 64
        assert engine.load().preemptions == 0


# -- pins --------------------------------------------------------------------------------------------------------------


async def test_a_pinned_prefix_is_not_evicted_until_its_pin_is_given_back(hosts: Hosts) -> None:
    subject = hosts.subject(num_blocks=8)
    async with subject.running() as engine, asyncio.timeout(SOON_S):
        spec = spec_of(PROMPT, 2)
        await subject.answer(spec)
        keys = spec.block_keys(PROMPT)
        pin = await engine.pin_prefix(keys)
        assert pin.num_tokens == 96
        assert len(pin.block_ids[0]) == 3
        rows = engine.caches[0].groups[0][:, list(pin.block_ids[0])].clone()
        assert rows[0, :, :BLOCK_SIZE].flatten().tolist() == PROMPT[:96]
        for number in range(4):
            other = [number + 1, *PROMPT]
            assert (await subject.answer(spec_of(other, 20, f"r{number}")))[0] == subject.expected(other, 20)
        assert bool((engine.caches[0].groups[0][:, list(pin.block_ids[0])] == rows).all())
        assert engine.load().blocks.in_use == 3
        assert not its(subject).is_idle
        engine.unpin(pin)
        engine.unpin(pin)
        for number in range(4):
            await subject.answer(spec_of([number + 7, *PROMPT], 20, f"s{number}"))
        assert (await engine.pin_prefix(keys)).num_tokens < 96
        assert engine.load().preemptions == 0
        engine.unpin(await engine.pin_prefix([b"unknown"]))


async def test_blocks_of_a_pin_that_is_on_its_way_are_given_to_no_sequence(hosts: Hosts) -> None:
    """Pinned blocks are not free. A sequence with a reservation for them would wait in vLLM, or preempt another."""
    subject = hosts.subject(num_blocks=8)
    async with subject.running() as engine, asyncio.timeout(SOON_S):
        await subject.answer(spec_of(PROMPT, 2))
        pinning = asyncio.create_task(engine.pin_prefix(spec_of(PROMPT).block_keys(PROMPT)))
        await asyncio.sleep(0)
        large = [PROMPT[-1], *PROMPT, *PROMPT]
        answering = asyncio.create_task(subject.answer(spec_of(large, 30)))
        pin = await pinning
        assert pin.num_tokens == 96
        await until(lambda: engine.load().waiting == 1, SOON_S)
        assert (engine.load().running, engine.load().preemptions) == (0, 0)
        engine.unpin(pin)
        assert (await answering)[0] == subject.expected(large, 30)
        assert engine.load().preemptions == 0


async def test_a_pin_takes_no_blocks_that_are_reserved(hosts: Hosts) -> None:
    subject = hosts.subject(num_blocks=8)
    async with subject.running() as engine, asyncio.timeout(SOON_S):
        await subject.answer(spec_of(PROMPT, 2))
        async with engine.sequence(spec_of(PROMPT[:65], 94), Purpose.RECEIVE) as handle:
            reserved = await handle.next()  # it shares two blocks of the prefix, and reserves five
            assert isinstance(reserved, Reserved)
            async with engine.sequence(spec_of(PROMPT[1:65], 1), Purpose.RECEIVE) as other:
                await other.next()  # the other three
                pin = await engine.pin_prefix(spec_of(PROMPT).block_keys(PROMPT))
                assert pin.num_tokens == 64, "those that are in use take no others"
                engine.unpin(pin)
        assert engine.load().preemptions == 0


@pytest.mark.parametrize("ends_first", [False, True])
async def test_a_pinned_prefix_of_an_answer_that_ends_is_given_to_no_sequence(hosts: Hosts, ends_first: bool) -> None:
    """The pin takes no blocks while the answer uses them; when the answer has ended, they are the pin's alone."""
    subject = hosts.subject(num_blocks=8)
    async with subject.running() as engine, asyncio.timeout(SOON_S):
        spec = spec_of(PROMPT, 500)
        async with engine.sequence(spec, Purpose.GENERATE) as handle:
            await handle.next()
            pinning = asyncio.create_task(engine.pin_prefix(spec.block_keys(PROMPT)))
            await asyncio.sleep(0)
            if not ends_first:
                await pinning
        pin = await pinning
        assert pin.num_tokens == 96
        large = [PROMPT[-1], *PROMPT, *PROMPT]
        answering = asyncio.create_task(subject.answer(spec_of(large, 30)))
        await until(lambda: engine.load().waiting == 1, SOON_S)
        assert (engine.load().running, engine.load().preemptions) == (0, 0)
        engine.unpin(pin)
        assert (await answering)[0] == subject.expected(large, 30)
        assert engine.load().preemptions == 0


async def test_who_does_not_wait_for_a_pin_leaves_none(hosts: Hosts) -> None:
    subject = hosts.subject(num_blocks=8)
    async with subject.running() as engine, asyncio.timeout(SOON_S):
        await subject.answer(spec_of(PROMPT, 2))
        pinning = asyncio.create_task(engine.pin_prefix(spec_of(PROMPT).block_keys(PROMPT)))
        await asyncio.sleep(0)
        pinning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pinning
        await until(lambda: engine.load().blocks.in_use == 0 and its(subject).is_idle, SOON_S)


async def test_who_leaves_just_as_a_pin_is_answered_leaves_none(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = hosts.subject(num_blocks=8)
    async with subject.running() as engine, asyncio.timeout(SOON_S):
        await subject.answer(spec_of(PROMPT, 2))
        pinning = asyncio.create_task(engine.pin_prefix(spec_of(PROMPT).block_keys(PROMPT)))
        handle = its(subject)._pinned

        def then_leaves(message: Pinned) -> None:
            handle(message)
            pinning.cancel()

        monkeypatch.setattr(its(subject), "_pinned", then_leaves)
        with pytest.raises(asyncio.CancelledError):
            await pinning
        await until(lambda: engine.load().blocks.in_use == 0 and its(subject).is_idle, SOON_S)


async def test_a_pin_that_the_end_of_the_run_leaves_open_is_of_nothing(hosts: Hosts) -> None:
    """A worker that ends, or loses its device, must not wait for an answer that never comes."""
    subject = hosts.subject(num_blocks=8)
    engine = subject.engine
    running = asyncio.create_task(engine.run(subject.events))
    await subject.answer(spec_of(PROMPT, 2))
    keys = spec_of(PROMPT).block_keys(PROMPT)
    pinning = asyncio.create_task(engine.pin_prefix(keys))
    await asyncio.sleep(0)
    running.cancel()
    async with asyncio.timeout(SOON_S):
        assert (await pinning).num_tokens == 0
        await asyncio.wait((running,))
        assert (await engine.pin_prefix(keys)).num_tokens == 0, "nor later"
