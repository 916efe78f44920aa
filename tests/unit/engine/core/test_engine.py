from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.blocks import block_keys
from baton.cluster import BlockCounts
from baton.costs import PRIOR, StepSize
from baton.errors import InvalidRequest
from baton.messages import SequenceSpec
from baton.sampling import FinishReason
from engine.core.block_pool import Removed, Stored
from engine.core.engine import Engine
from engine.core.outputs import Admitted, Generated, Output, Pin, Preempted, Reserved
from engine.core.runner import EMPTY_PLACE, StepInput, StepOutput
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose, Sequence, Status
from engine.model.kv_cache import KVCache
from engine.testing import ArithmeticRunner, expected_tokens, modulus
from tests.support.builders import sequence_spec, step_costs

BLOCK = 16


def make_spec(
    token_ids: Iterable[int], max_tokens: int = 8, *, name: str = "r", cache_seed: bytes = b"tenant", **values: Any
) -> SequenceSpec:
    """A greedy sequence.

    Args:
        max_tokens: 0: of a prefix that is only received.
        values: further ones of `sequence_spec`.
    """
    return sequence_spec(tuple(token_ids), name, max_tokens=max_tokens or None, cache_seed=cache_seed, **values)


def make_engine(
    num_blocks: int = 64,
    *,
    block_size: int = BLOCK,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    output_reservation: int = 32,
    max_model_len: int = 8192,
    snapshot_tokens: int = 1024,
    **shape: Any,
) -> Engine:
    """An engine of the arithmetic model.

    Args:
        shape: further arguments of `ArithmeticRunner`.
    """
    runner = ArithmeticRunner(num_blocks, block_size, max_model_len=max_model_len, max_num_seqs=max_num_seqs, **shape)
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        output_reservation=output_reservation,
        snapshot_tokens=snapshot_tokens,
    )
    return Engine(runner, limits)


def step(engine: Engine, now: float = 0.0) -> list[Output]:
    """One step; the engine's books are checked after every call of it."""
    batch, outputs = engine.schedule(now)
    engine.check()
    outputs += engine.commit(batch, engine.runner.execute(batch), now)
    engine.check()
    return outputs


def generated(outputs: Iterable[Output], sequence: Sequence) -> list[int]:
    mine = (o for o in outputs if isinstance(o, Generated) and o.sequence_key == sequence.key)
    return [token_id for o in mine for token_id in o.token_ids]


def num_blocks(sequence: Sequence) -> int:
    """Blocks that it holds of the first layer group."""
    return len(sequence.block_ids[0])


def admitted(sequence: Sequence, num_cached_tokens: int = 0) -> Admitted:
    """What the engine says when it admits a prompt to compute."""
    return Admitted(sequence.key, sequence.block_ids, num_cached_tokens)


def reserved_for(sequence: Sequence, num_cached_tokens: int = 0) -> Reserved:
    """What the engine says when it has the blocks for KV from elsewhere."""
    return Reserved(
        sequence_key=sequence.key,
        block_ids=sequence.block_ids,
        num_tokens=sequence.num_tokens,
        num_cached_tokens=num_cached_tokens,
    )


def drain(engine: Engine, max_steps: int = 10_000) -> list[Output]:
    """Steps until nothing can run."""
    outputs: list[Output] = []
    for now in range(max_steps):
        batch, reserved = engine.schedule(float(now))
        outputs += reserved
        if not batch:
            return outputs
        outputs += engine.commit(batch, engine.runner.execute(batch), float(now))
        engine.check()
    raise AssertionError("the engine does not come to rest")


def finish_of(outputs: Iterable[Output]) -> FinishReason | None:
    last = list(outputs)[-1]
    assert isinstance(last, Generated)
    return last.finish_reason


def is_empty(engine: Engine) -> bool:
    """Nothing is held: every block is free or cached, and no sequence is known."""
    engine.check()
    counts, load = engine.pool.counts(), engine.load()
    assert engine.is_idle == (counts.in_use + load.running + load.waiting == 0)
    return counts.in_use == 0 and counts.free + counts.cached == counts.total and load.running + load.waiting == 0


def kv_transfer(source: Engine, held: Sequence, target: Engine, reserved: Reserved) -> None:
    """What the KV transfer does, by hand: the blocks the receiver lacks, and the state."""
    skip = reserved.num_cached_tokens // BLOCK
    num_blocks = -(-(held.num_tokens - 1) // BLOCK)
    pairs = list(zip(held.block_ids[0], reserved.block_ids[0], strict=False))[skip:num_blocks]
    for ours, theirs in zip(source.runner.caches[0].groups, target.runner.caches[0].groups, strict=True):
        for source_block, target_block in pairs:
            theirs[:, target_block] = ours[:, source_block]
    for name, state in source.runner.caches[0].states.items():
        target.runner.caches[0].states[name][reserved.block_ids[-1][0]] = state[held.block_ids[-1][0]]


def numbers(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 49152) for _ in range(count)]


# -- computing ---------------------------------------------------------------------------------------------------------


def test_the_arithmetic_model_can_be_worked_out_by_hand() -> None:
    assert expected_tokens([2, 3, 4], 3) == [20, 100, 600]  # 2+6+12, +4*20, +5*100
    assert expected_tokens([2, 3, 4], 2, with_state=True) == [29, 174]  # 20 + 9, 20 + 4*29 + 38
    assert expected_tokens([2, 3, 4], 1, vocab_size=7) == [6]


def written(cache: KVCache, layer: int, blocks: Iterable[int]) -> list[int]:
    """The tokens that K of a layer names, 0 where nothing has been written."""
    pages = cache.layer(layer).view(-1, 2, cache.spec.block_size)
    return [int(token) for block in blocks for token in pages[block, 0]]


def test_layers_are_told_in_order_once_the_whole_batch_is_in_them() -> None:
    runner = ArithmeticRunner(16, num_layers=5, layer_s=0.01)
    engine = Engine(
        runner,
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, output_reservation=0),
    )
    prompts = [numbers(1, 20), numbers(2, 40)]
    for name, prompt in zip("ab", prompts, strict=True):
        engine.add(make_spec(prompt, name=name), Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    seen = []

    def layer_done(layer: int, fence: object) -> None:
        assert fence is None
        for part, prompt in zip(batch.parts, prompts, strict=True):
            for other in range(5):
                tokens = written(runner.caches[0], other, part.block_ids[0])[: len(prompt)]
                assert tokens == (prompt if other <= layer else [0] * len(prompt))
        seen.append((layer, time.monotonic()))

    start = time.monotonic()
    sampled = runner.execute(batch, layer_done)
    assert [layer for layer, _ in seen] == [0, 1, 2, 3, 4]
    assert all(at - start >= 0.01 * (layer + 1) for layer, at in seen)
    tokens = tuple(tuple(expected_tokens(prompt, 1)) for prompt in prompts)
    assert sampled == StepOutput(sampled_token_ids=tokens, num_computed_tokens=(20, 40))


def test_of_more_layers_every_page_that_disagrees_adds_one() -> None:
    runner = ArithmeticRunner(16, num_layers=5)
    engine = Engine(
        runner,
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, output_reservation=0),
    )
    sequence = engine.add(make_spec(numbers(1, 20), 2), Purpose.GENERATE, 0.0)
    step(engine)
    runner.cache.layer(4).view(-1, 2, BLOCK)[sequence.block_ids[0][0], :, 3] += 7
    runner.cache.layer(1).view(-1, 2, BLOCK)[sequence.block_ids[0][1], 1, 0] += 7
    assert generated(step(engine), sequence) == [(expected_tokens(numbers(1, 20), 2)[1] + 3) % 49152]


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 32, 63, 64, 65, 200])
def test_a_prompt_in_chunks_gives_the_exact_tokens(num_prompt_tokens: int, with_state: bool) -> None:
    engine = make_engine(with_state=with_state)
    prompt = numbers(num_prompt_tokens, num_prompt_tokens)
    sequence = engine.add(make_spec(prompt, 40), Purpose.GENERATE, 0.0)
    outputs = drain(engine)
    assert generated(outputs, sequence) == expected_tokens(prompt, 40, with_state=with_state)
    assert finish_of(outputs) is FinishReason.LENGTH
    assert is_empty(engine)


def test_a_long_prompt_is_computed_in_steps_of_the_budget() -> None:
    engine = make_engine(max_num_batched_tokens=48)
    engine.add(make_spec(numbers(1, 100)), Purpose.GENERATE, 0.0)
    spans = []
    for _ in range(3):
        batch, _ = engine.schedule(0.0)
        (part,) = batch.parts
        spans.append((part.num_computed_tokens, part.num_scheduled_tokens, part.sample))
        engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert spans == [(0, 48, False), (48, 48, False), (96, 4, True)]


@pytest.mark.parametrize("with_state", [False, True])
def test_staggered_arrivals_share_steps_and_stay_exact(with_state: bool) -> None:
    engine = make_engine(128, with_state=with_state)
    prompts = [numbers(i, length) for i, length in enumerate((5, 100, 1, 33, 70, 16, 48))]
    sequences: list[Sequence] = []
    outputs: list[Output] = []
    sizes = []
    for now in range(60):
        if now % 2 == 0 and len(sequences) < len(prompts):
            i = len(sequences)
            sequences.append(engine.add(make_spec(prompts[i], 12, name=f"r{i}"), Purpose.GENERATE, float(now)))
        batch, _ = engine.schedule(float(now))
        sizes.append(len(batch.parts))
        assert sum(part.num_scheduled_tokens for part in batch.parts) <= 64
        outputs += engine.commit(batch, engine.runner.execute(batch), float(now))
        engine.check()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert generated(outputs, sequence) == expected_tokens(prompt, 12, with_state=with_state)
    assert max(sizes) >= 4, "the sequences never ran together"
    assert is_empty(engine)


@pytest.mark.parametrize("what", ["lose", "alter keys", "alter values", "swap"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_damaged_block_changes_the_answer(what: str, layer: int) -> None:
    """The tests of scheduling and KV transfer stand on this: wrong KV never goes unnoticed, in whichever layer."""
    engine = make_engine()
    prompt = numbers(1, 40)
    sequence = engine.add(make_spec(prompt, 4), Purpose.GENERATE, 0.0)
    assert generated(step(engine), sequence) == expected_tokens(prompt, 1)
    pages = engine.runner.caches[0].groups[0][layer].view(-1, 2, BLOCK)
    first, second = sequence.block_ids[0][:2]
    match what:
        case "lose":
            pages[first] = 0
        case "alter keys":
            pages[second, 0, 3] += 1
        case "alter values":
            pages[second, 1, 3] += 1
        case "swap":
            pages[[first, second]] = pages[[second, first]]
    assert generated(step(engine), sequence) != expected_tokens(prompt, 2)[1:]


# -- prefix cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"),
    # The last token is always computed here, so the block that it fills is not taken from the cache.
    [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (64, 48), (65, 64)],
)
def test_a_repeated_prompt_is_found_in_the_cache(num_tokens: int, num_cached: int) -> None:
    engine = make_engine()
    prompt = numbers(3, num_tokens)
    for turn in range(2):
        sequence = engine.add(make_spec(prompt, 5, name=f"r{turn}"), Purpose.GENERATE, 0.0)
        outputs = drain(engine)
        assert generated(outputs, sequence) == expected_tokens(prompt, 5)
        assert sequence.num_cached_tokens == (num_cached if turn else 0)


def test_a_cached_prefix_is_not_computed_again() -> None:
    engine = make_engine()
    prompt = numbers(3, 50)
    engine.add(make_spec(prompt, 1), Purpose.GENERATE, 0.0)
    drain(engine)
    engine.add(make_spec([*prompt[:40], 7, 8], 1, name="again"), Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    (part,) = batch.parts
    assert (part.num_computed_tokens, part.num_scheduled_tokens) == (32, 10)


def test_the_answer_is_cached_too_for_the_next_turn() -> None:
    engine = make_engine()
    first = engine.add(make_spec(numbers(4, 20), 30), Purpose.GENERATE, 0.0)
    drain(engine)
    turn = [*first.token_ids, 5, 6, 7]
    second = engine.add(make_spec(turn, 4, name="second"), Purpose.GENERATE, 0.0)
    outputs = drain(engine)
    assert second.num_cached_tokens == 48
    assert generated(outputs, second) == expected_tokens(turn, 4)


def test_the_cached_count_is_of_prompt_tokens_only() -> None:
    engine = make_engine()
    first = engine.add(make_spec(numbers(4, 20), 30), Purpose.GENERATE, 0.0)
    drain(engine)
    resumed = make_spec(first.token_ids, 40, name="resumed", num_prompt_tokens=20)
    sequence = engine.add(resumed, Purpose.GENERATE, 0.0)
    step(engine)
    assert sequence.num_computed_tokens == 50
    assert sequence.num_cached_tokens == 20


def test_tenants_do_not_share_a_cache() -> None:
    engine = make_engine()
    prompt = numbers(5, 40)
    for turn, (seed, cached) in enumerate([(b"a", 0), (b"b", 0), (b"a", 32)]):
        sequence = engine.add(make_spec(prompt, 2, name=f"r{turn}", cache_seed=seed), Purpose.GENERATE, 0.0)
        drain(engine)
        assert sequence.num_cached_tokens == cached


def test_a_running_sequence_shares_its_blocks() -> None:
    engine = make_engine()
    prompt = numbers(6, 40)
    first = engine.add(make_spec(prompt, 20), Purpose.GENERATE, 0.0)
    outputs = step(engine)
    second = engine.add(make_spec([*prompt[:35], 1], 20, name="second"), Purpose.GENERATE, 1.0)
    outputs += step(engine)
    assert second.block_ids[0][:2] == first.block_ids[0][:2]
    outputs += drain(engine)
    assert generated(outputs, first) == expected_tokens(prompt, 20)
    assert generated(outputs, second) == expected_tokens([*prompt[:35], 1], 20)


def test_two_that_compute_one_prompt_at_once_end_up_sharing_it() -> None:
    engine = make_engine(max_num_batched_tokens=128)
    prompt = numbers(6, 40)
    first = engine.add(make_spec(prompt, 20), Purpose.GENERATE, 0.0)
    second = engine.add(make_spec(prompt, 20, name="second"), Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    a, b = batch.parts
    assert not set(a.block_ids[0]) & set(b.block_ids[0])
    outputs = engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert second.block_ids[0][:2] == first.block_ids[0][:2]
    assert second.block_ids[0][2] != first.block_ids[0][2]
    outputs += drain(engine)
    assert generated(outputs, first) == generated(outputs, second) == expected_tokens(prompt, 20)
    assert is_empty(engine)


def test_what_is_cached_can_always_be_reached_from_its_first_block() -> None:
    """A prompt that ends with its block is computed beside the cached copy of it; what follows must build on that."""
    engine = make_engine(8, output_reservation=0)
    prompt = numbers(6, 32)
    engine.add(make_spec(prompt, 1), Purpose.GENERATE, 0.0)
    drain(engine)
    long = engine.add(make_spec(prompt, 60, name="long"), Purpose.GENERATE, 0.0)
    outputs = drain(engine)  # grows to six blocks of eight, so that idle copies would be evicted
    engine.add(make_spec(numbers(9, 30), 1, name="other"), Purpose.GENERATE, 0.0)
    drain(engine)
    again = engine.add(make_spec(long.token_ids[:65], 1, name="again"), Purpose.GENERATE, 0.0)
    step(engine)
    assert generated(outputs, long) == expected_tokens(prompt, 60)
    assert again.num_cached_tokens == 64


def test_block_events_replayed_give_what_is_cached() -> None:
    engine = make_engine(8)
    known: set[bytes] = set()
    num_removed = 0
    for i in range(20):
        engine.add(make_spec(numbers(i % 7, 40), 10, name=f"r{i}"), Purpose.GENERATE, 0.0)
        drain(engine)
        for event in engine.take_block_events():
            match event:
                case Stored(key):
                    known.add(key)
                case Removed(key):
                    known.remove(key)
                    num_removed += 1
        assert known == set(engine.pool.keys())
    assert num_removed


# -- the pool is too small ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_state", [False, True])
def test_preemption_keeps_every_token_exact(with_state: bool) -> None:
    engine = make_engine(7, output_reservation=0, with_state=with_state)
    prompts = [numbers(i, 20) for i in range(4)]
    sequences = [
        engine.add(make_spec(prompt, 60, name=f"r{i}"), Purpose.GENERATE, float(i)) for i, prompt in enumerate(prompts)
    ]
    outputs = drain(engine)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert generated(outputs, sequence) == expected_tokens(prompt, 60, with_state=with_state)
    assert engine.scheduler.num_preemptions > 0
    assert is_empty(engine)


def test_preemption_does_not_change_the_cached_count() -> None:
    engine = make_engine(7, output_reservation=0)
    sequences = [engine.add(make_spec(numbers(i, 40), 50, name=f"r{i}"), Purpose.GENERATE, float(i)) for i in range(2)]
    drain(engine)
    assert engine.scheduler.num_preemptions > 0
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 0]


def test_a_sequence_as_large_as_the_pool_runs() -> None:
    engine = make_engine(4)
    prompt = numbers(8, 30)
    sequence = engine.add(make_spec(prompt, 1000), Purpose.GENERATE, 0.0)
    outputs = drain(engine)
    assert generated(outputs, sequence) == expected_tokens(prompt, 34)
    assert finish_of(outputs) is FinishReason.LENGTH
    assert sequence.num_tokens == engine.runner.max_model_len == 64


# -- how a sequence ends -----------------------------------------------------------------------------------------------


def prompt_answered_with(token_id: int) -> list[int]:
    """A two-token prompt whose first answer token is `token_id`."""
    prompt = [(token_id - 2) % modulus(49152), 1]
    assert expected_tokens(prompt, 1) == [token_id]
    return prompt


def test_end_of_sequence() -> None:
    engine = make_engine()
    sequence = engine.add(make_spec(prompt_answered_with(0), ignore_eos=False), Purpose.GENERATE, 0.0)
    outputs = drain(engine)
    assert generated(outputs, sequence) == [0]
    assert finish_of(outputs) is FinishReason.STOP
    assert is_empty(engine)


def test_end_of_sequence_is_ignored_on_request() -> None:
    engine = make_engine()
    prompt = prompt_answered_with(0)
    sequence = engine.add(make_spec(prompt, 3, ignore_eos=True), Purpose.GENERATE, 0.0)
    outputs = drain(engine)
    assert generated(outputs, sequence) == expected_tokens(prompt, 3)
    assert finish_of(outputs) is FinishReason.LENGTH


def test_stop_ids_end_it_even_when_the_end_of_sequence_is_ignored() -> None:
    engine = make_engine()
    prompt = numbers(9, 20)
    tokens = expected_tokens(prompt, 10)
    spec = make_spec(prompt, 10, stop_token_ids=(tokens[4],), ignore_eos=True)
    sequence = engine.add(spec, Purpose.GENERATE, 0.0)
    outputs = drain(engine)
    assert generated(outputs, sequence) == tokens[:5]
    assert finish_of(outputs) is FinishReason.STOP


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    engine = make_engine()
    prompt = prompt_answered_with(77)
    engine.add(make_spec(prompt, 1, stop_token_ids=(77,)), Purpose.GENERATE, 0.0)
    assert finish_of(drain(engine)) is FinishReason.STOP


def test_the_context_window_ends_it() -> None:
    engine = make_engine(max_model_len=30)
    sequence = engine.add(make_spec(numbers(1, 25), 100), Purpose.GENERATE, 0.0)
    outputs = drain(engine)
    assert len(generated(outputs, sequence)) == 5
    assert finish_of(outputs) is FinishReason.LENGTH


def test_max_tokens_counts_what_a_resumed_sequence_brought() -> None:
    engine = make_engine()
    prompt = numbers(2, 10)
    answer = expected_tokens(prompt, 20)
    resumed = make_spec(prompt + answer[:15], 20, num_prompt_tokens=10, attempt=1)
    sequence = engine.add(resumed, Purpose.GENERATE, 0.0)
    outputs = drain(engine)
    assert generated(outputs, sequence) == answer[15:]
    assert finish_of(outputs) is FinishReason.LENGTH


def test_times_are_recorded() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    sequence = engine.add(make_spec(numbers(2, 30), 2), Purpose.GENERATE, 1.0)
    step(engine, 2.0)
    step(engine, 3.0)
    step(engine, 4.0)
    assert (sequence.arrival_s, sequence.scheduled_s, sequence.first_token_s) == (1.0, 2.0, 3.0)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_an_id_may_come_again_while_the_first_is_still_in_flight() -> None:
    """A client cancels and sends the same request again, before the step with the first one is over."""
    engine = make_engine()
    first = engine.add(make_spec([1, 2], name="same"), Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    engine.end(first)
    second = engine.add(make_spec([1, 2], name="same"), Purpose.GENERATE, 0.0)
    engine.commit(batch, engine.runner.execute(batch), 0.0)
    tokens = [output.token_ids[0] for output in drain(engine) if isinstance(output, Generated)]
    assert tokens == expected_tokens([1, 2], second.spec.max_tokens)
    assert is_empty(engine)


@pytest.mark.parametrize("num_tokens", [0, 64, 65])
def test_what_cannot_fit_is_refused(num_tokens: int) -> None:
    engine = make_engine(4)
    with pytest.raises(InvalidRequest, match=rf"{num_tokens} tokens do not fit; this worker takes 1 to 63"):
        engine.add(make_spec([1] * num_tokens), Purpose.GENERATE, 0.0)
    assert is_empty(engine)
    engine.add(make_spec([1] * 63), Purpose.GENERATE, 0.0)


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("token_id", [49152, 2**32 - 1, -1])
def test_a_token_id_without_an_embedding_is_refused(token_id: int, purpose: Purpose) -> None:
    engine = make_engine()
    with pytest.raises(
        InvalidRequest, match=rf"token id {token_id} is outside the model's vocabulary, whose ids are 0 to 49151"
    ):
        engine.add(make_spec([1, 2, token_id, 3]), purpose, 0.0)
    assert is_empty(engine)
    engine.add(make_spec([0, 49151]), purpose, 0.0)


@pytest.mark.parametrize(
    "asked",
    [{"allowed_token_ids": (49152,)}, {"logit_bias": ((49152, 1.0),)}, {"bad_word_ids": ((1, 49152),)}],
    ids=lambda asked: next(iter(asked)),
)
def test_a_token_id_without_a_logit_is_refused(asked: dict[str, Any]) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="token id 49152 is outside the model's vocabulary"):
        engine.add(make_spec([1], 5, **asked), Purpose.GENERATE, 0.0)
    assert is_empty(engine)


# -- KV transfer -------------------------------------------------------------------------------------------------------


def test_prefill_holds_its_blocks_until_it_is_ended() -> None:
    engine = make_engine()
    prompt = numbers(1, 100)
    sequence = engine.add(make_spec(prompt), Purpose.PREFILL, 0.0)
    outputs = drain(engine)
    assert outputs[0] == admitted(sequence)
    assert generated(outputs, sequence) == expected_tokens(prompt, 1)
    assert finish_of(outputs) is None
    assert sequence.status is Status.HELD
    assert engine.pool.counts().in_use == 7
    assert engine.load().running == engine.load().queued_tokens == 0
    engine.check()
    engine.end(sequence)
    engine.end(sequence)
    assert sequence.status.value == "finished"
    assert engine.pool.counts().cached == 6
    assert is_empty(engine)


def test_a_prefill_is_told_of_all_its_blocks_before_its_first_step() -> None:
    engine = make_engine(8)
    prompt = numbers(1, 100)
    before = engine.add(make_spec(prompt[:40], 1, name="before"), Purpose.GENERATE, 0.0)
    drain(engine)
    sequence = engine.add(make_spec(prompt, name="first"), Purpose.PREFILL, 0.0)
    later = engine.add(make_spec(numbers(2, 40), name="later"), Purpose.PREFILL, 0.0)
    batch, outputs = engine.schedule(0.0)
    (part,) = batch.parts
    assert outputs == [admitted(sequence, 32)]
    assert before.block_ids == ()
    assert (sequence.num_computed_tokens, num_blocks(sequence), part.num_computed_tokens, part.end) == (
        32,
        7,
        32,
        96,
    )
    engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert not any(isinstance(output, Admitted) for output in drain(engine))
    engine.end(sequence)
    assert drain(engine)[0] == admitted(later), "once there was room"


def test_prefill_says_when_the_first_token_is_the_last() -> None:
    engine = make_engine()
    sequence = engine.add(make_spec([1, 2, 3], 1), Purpose.PREFILL, 0.0)
    assert finish_of(drain(engine)) is FinishReason.LENGTH
    engine.end(sequence)
    assert is_empty(engine)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 64, 100])
def test_transferred_it_gives_the_same_tokens(num_tokens: int, with_state: bool) -> None:
    prefill, decode = (make_engine(with_state=with_state) for _ in range(2))
    decode.add(make_spec(numbers(50, 33), 50, name="neighbour"), Purpose.GENERATE, 0.0)  # so that block tables differ
    step(decode)
    prompt = numbers(num_tokens, num_tokens)
    held = prefill.add(make_spec(prompt, 20), Purpose.PREFILL, 0.0)
    receiver = decode.add(make_spec(prompt, 20), Purpose.RECEIVE, 0.0)
    reserved = next(output for output in step(decode) if isinstance(output, Reserved))
    assert reserved == reserved_for(receiver)
    assert receiver.status is Status.RESERVED
    _, first = drain(prefill)
    assert isinstance(first, Generated)
    kv_transfer(prefill, held, decode, reserved)
    assert decode.insert(receiver, first.token_ids[0], 3.0) is None
    prefill.end(held)
    outputs = drain(decode)
    assert [first.token_ids[0], *generated(outputs, receiver)] == expected_tokens(prompt, 20, with_state=with_state)
    assert receiver.first_token_s == 3.0
    assert is_empty(prefill)
    assert is_empty(decode)


def test_without_the_state_the_answer_is_wrong() -> None:
    """Guards the test above: it would not see a state that is left behind otherwise."""
    prefill, decode = (make_engine(with_state=True) for _ in range(2))
    held = prefill.add(make_spec([4, 5, 6]), Purpose.PREFILL, 0.0)
    receiver = decode.add(make_spec([4, 5, 6]), Purpose.RECEIVE, 0.0)
    (reserved,) = drain(decode)
    _, first = drain(prefill)
    assert isinstance(reserved, Reserved)
    assert isinstance(first, Generated)
    kv_transfer(prefill, held, decode, reserved)
    decode.runner.caches[0].states["token_sum"].zero_()
    decode.insert(receiver, first.token_ids[0], 0.0)
    assert generated(drain(decode), receiver) != expected_tokens([4, 5, 6], 8, with_state=True)[1:]


@pytest.mark.parametrize(("num_tokens", "skip"), [(40, 32), (48, 48), (49, 48)])
def test_a_receiver_skips_what_it_holds_already(num_tokens: int, skip: int) -> None:
    prefill, decode = make_engine(), make_engine()
    prompt = numbers(8, num_tokens)
    decode.add(make_spec(prompt, 4, name="before"), Purpose.GENERATE, 0.0)
    drain(decode)
    held = prefill.add(make_spec(prompt, 20), Purpose.PREFILL, 0.0)
    _, first = drain(prefill)
    receiver = decode.add(make_spec(prompt, 20), Purpose.RECEIVE, 0.0)
    (reserved,) = drain(decode)
    assert reserved == reserved_for(receiver, skip)
    assert isinstance(first, Generated)
    kv_transfer(prefill, held, decode, reserved)
    decode.insert(receiver, first.token_ids[0], 0.0)
    assert [first.token_ids[0], *generated(drain(decode), receiver)] == expected_tokens(prompt, 20)
    assert is_empty(decode)


def test_received_blocks_are_cached_for_others() -> None:
    prefill, decode = make_engine(), make_engine()
    prompt = numbers(8, 40)
    held = prefill.add(make_spec(prompt), Purpose.PREFILL, 0.0)
    _, first = drain(prefill)
    receiver = decode.add(make_spec(prompt), Purpose.RECEIVE, 0.0)
    (reserved,) = drain(decode)
    assert isinstance(first, Generated)
    assert isinstance(reserved, Reserved)
    assert decode.pool.keys() == [], "nothing is readable before the commit"
    kv_transfer(prefill, held, decode, reserved)
    decode.insert(receiver, first.token_ids[0], 0.0)
    assert len(decode.pool.keys()) == 2
    drain(decode)
    sequence = decode.add(make_spec(prompt, name="after"), Purpose.GENERATE, 0.0)
    assert generated(drain(decode), sequence) == expected_tokens(prompt, 8)
    assert sequence.num_cached_tokens == 32


def test_insert_may_end_it_at_once() -> None:
    engine = make_engine()
    receiver = engine.add(make_spec([1, 2], stop_token_ids=(9,)), Purpose.RECEIVE, 0.0)
    drain(engine)
    assert engine.insert(receiver, 9, 0.0) is FinishReason.STOP
    assert is_empty(engine)


def test_a_reservation_holds_room_for_the_answer() -> None:
    engine = make_engine(8, output_reservation=40)
    receiver = engine.add(make_spec(numbers(1, 20), 100), Purpose.RECEIVE, 0.0)
    drain(engine)
    assert num_blocks(receiver) == 4  # 20 + 40 tokens
    second = engine.add(make_spec(numbers(2, 60), 10, name="second"), Purpose.RECEIVE, 0.0)
    assert drain(engine) == []
    assert second.status is Status.WAITING
    assert second.block_ids == ()
    engine.end(receiver)
    assert drain(engine) == [reserved_for(second)]
    assert num_blocks(second) == 5
    engine.end(second)
    assert is_empty(engine)


def test_a_received_sequence_survives_preemption() -> None:
    prefill, decode = make_engine(), make_engine(6, output_reservation=0)
    specs = [make_spec(numbers(i, 30), 50, name=f"r{i}") for i in range(3)]
    outputs: list[Output] = []
    receivers = []
    for now, spec in enumerate(specs):
        held = prefill.add(spec, Purpose.PREFILL, 0.0)
        _, first = drain(prefill)
        receiver = decode.add(spec, Purpose.RECEIVE, float(now))
        reserved = next(o for o in decode.schedule(0.0)[1] if isinstance(o, Reserved))
        assert isinstance(first, Generated)
        kv_transfer(prefill, held, decode, reserved)
        receivers.append(receiver)
    for spec, receiver in zip(specs, receivers, strict=True):
        decode.insert(receiver, expected_tokens(spec.token_ids, 1)[0], 0.0)
    outputs = drain(decode)
    assert decode.scheduler.num_preemptions > 0
    for spec, receiver in zip(specs, receivers, strict=True):
        assert generated(outputs, receiver) == expected_tokens(spec.token_ids, 50)[1:]
    assert is_empty(decode)


def test_a_prefill_keeps_its_blocks_whoever_needs_them() -> None:
    """The youngest, and others grow until nothing is left: they wait for its KV transfer rather than take its
    blocks."""
    engine = make_engine(8, output_reservation=0)
    prompts = [numbers(i, 20) for i in range(2)]
    others = [engine.add(make_spec(prompts[i], 60, name=f"r{i}"), Purpose.GENERATE, float(i)) for i in range(2)]
    outputs = step(engine)
    prefill = engine.add(make_spec(numbers(7, 64), name="prefill"), Purpose.PREFILL, 9.0)
    engine.scheduler.limits = SchedulerLimits(
        max_num_seqs=8, max_num_batched_tokens=8, output_reservation=0
    )  # its prompt takes more steps than a block lasts
    outputs += step(engine)
    table = prefill.block_ids[0]
    while prefill.status is Status.RUNNING:
        outputs += step(engine)
        assert prefill.block_ids[0] == table
    assert engine.scheduler.num_preemptions == 0
    outputs += drain(engine)
    assert engine.scheduler.num_preemptions > 0
    assert prefill.block_ids[0] == table
    assert generated(outputs, prefill) == expected_tokens(numbers(7, 64), 1)
    assert not all(other.status is Status.FINISHED for other in others)
    engine.end(prefill)
    outputs += drain(engine)
    for prompt, other in zip(prompts, others, strict=True):
        assert generated(outputs, other) == expected_tokens(prompt, 60)
    assert is_empty(engine)


# -- pins: what transfers read -----------------------------------------------------------------------------------------


def test_pinned_blocks_outlive_their_sequence_and_keep_their_content() -> None:
    engine = make_engine(8, output_reservation=0)
    prompt = numbers(1, 60)
    held = engine.add(make_spec(prompt), Purpose.PREFILL, 0.0)
    drain(engine)
    pin = engine.pin(held)
    blocks = pin.block_ids[0]
    assert pin.block_ids == held.block_ids
    engine.end(held)
    engine.check()
    assert engine.pool.counts().in_use == 4
    assert not engine.is_idle
    for i in range(3):  # all other blocks, several times
        engine.add(make_spec(numbers(10 + i, 30), 30, name=f"r{i}"), Purpose.GENERATE, 0.0)
        drain(engine)
    assert (
        written(engine.runner.caches[0], 0, blocks)[:60] == written(engine.runner.caches[0], 1, blocks)[:60] == prompt
    )
    engine.unpin(pin)
    assert engine.pool.counts().cached >= 3
    assert is_empty(engine)


def test_a_block_pinned_twice_is_free_after_both() -> None:
    engine = make_engine()
    held = engine.add(make_spec(numbers(1, 40)), Purpose.PREFILL, 0.0)
    drain(engine)
    first, second = engine.pin(held), engine.pin(held)
    engine.end(held)
    engine.unpin(first)
    engine.check()
    assert engine.pool.counts().in_use == 3
    engine.unpin(second)
    assert is_empty(engine)
    with pytest.raises(AssertionError, match="unpinned more often than pinned"):
        engine.unpin(second)


def test_a_table_that_changes_leaves_the_pinned_blocks_as_they_were() -> None:
    """Of two that compute one prompt at once, the second moves to the blocks of the first."""
    engine = make_engine(8, max_num_batched_tokens=128)
    prompt = numbers(6, 40)
    first = engine.add(make_spec(prompt), Purpose.PREFILL, 0.0)
    second = engine.add(make_spec(prompt, name="second"), Purpose.PREFILL, 0.0)
    batch, _ = engine.schedule(0.0)
    pin = engine.pin(second)
    blocks = pin.block_ids[0]
    engine.commit(batch, engine.runner.execute(batch), 0.0)
    assert second.block_ids[0][:2] == first.block_ids[0][:2] != blocks[:2]
    engine.end(first)
    engine.end(second)
    engine.add(make_spec(numbers(9, 70), 10, name="other"), Purpose.GENERATE, 0.0)
    drain(engine)
    assert written(engine.runner.caches[0], 1, blocks)[:40] == prompt
    engine.unpin(pin)
    assert is_empty(engine)


def test_who_waits_for_blocks_is_admitted_when_they_are_unpinned() -> None:
    engine = make_engine(4)
    held = engine.add(make_spec(numbers(1, 50)), Purpose.PREFILL, 0.0)
    drain(engine)
    pin = engine.pin(held)
    engine.end(held)
    waiting = engine.add(make_spec(numbers(2, 40), 4, name="waiting"), Purpose.GENERATE, 0.0)
    assert drain(engine) == []
    engine.unpin(pin)
    assert generated(drain(engine), waiting) == expected_tokens(numbers(2, 40), 4)


@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_the_longest_cached_prefix_of_a_key_chain_is_pinned(block_size: int) -> None:
    engine = make_engine(12, block_size=block_size)
    prompt = numbers(1, 200)
    engine.add(make_spec(prompt[:150], 1), Purpose.GENERATE, 0.0)
    drain(engine)
    keys = block_keys(b"tenant", prompt)
    assert len(keys) == 12
    whole = engine.pin_prefix(keys)
    blocks = whole.block_ids[0]
    num_tokens = 150 // block_size * block_size
    assert written(engine.runner.caches[0], 0, blocks) == prompt[:num_tokens]
    engine.check()
    assert not engine.is_idle
    part = engine.pin_prefix(keys[:5])
    assert part.block_ids == (blocks[: 80 // block_size],)
    assert engine.pin_prefix(block_keys(b"another tenant", prompt)).block_ids == ((),)
    for i in range(2, 5):  # what is left of the pool, several times
        engine.add(make_spec(numbers(i, 30), 10, name=f"r{i}"), Purpose.GENERATE, 0.0)
        drain(engine)
    assert written(engine.runner.caches[0], 0, blocks) == prompt[:num_tokens], "not evicted"
    engine.unpin(part)
    engine.unpin(whole)
    assert is_empty(engine)


def test_the_load_counts_the_rows_of_states() -> None:
    engine = make_engine(with_state=True, max_num_seqs=8)
    assert engine.load().state_rows == BlockCounts(32, free=32)
    running = engine.add(make_spec(numbers(1, 40)), Purpose.GENERATE, 0.0)
    step(engine)
    assert engine.load().state_rows == BlockCounts(32, free=29, in_use=3), "a snapshot and two"
    engine.end(running)
    assert engine.load().state_rows == BlockCounts(32, free=31, cached=1)
    assert make_engine().load().state_rows == BlockCounts()


def test_a_prefix_of_a_model_with_state_is_pinned_and_adopted_with_a_row() -> None:
    engine, prompt = make_engine(with_state=True), numbers(1, 40)
    receiver = engine.add(make_spec(prompt, 0), Purpose.RECEIVE, 0.0)
    (reserved,) = drain(engine)
    assert isinstance(reserved, Reserved)
    write_prompt_kv(engine.runner.caches[0], receiver, (0,), 32)
    engine.adopt(receiver, 32)
    pin = engine.pin_prefix(block_keys(b"tenant", prompt))
    assert pin.num_tokens == 32
    assert pin.block_ids == (reserved.block_ids[0][:2], reserved.block_ids[1][:1])
    engine.end(receiver)
    engine.unpin(pin)
    sequence = engine.add(make_spec(prompt, 5, name="later"), Purpose.GENERATE, 0.0)
    assert generated(drain(engine), sequence) == expected_tokens(prompt, 5, with_state=True)
    assert sequence.num_cached_tokens == 32
    assert is_empty(engine)


# -- adopting KV from elsewhere ----------------------------------------------------------------------------------------


def reserve_to_fill(engine: Engine, prompt: list[int], name: str = "fill") -> tuple[Sequence, Reserved]:
    """A sequence that only brings KV into the cache."""
    receiver = engine.add(make_spec(prompt, 0, name=name), Purpose.RECEIVE, 0.0)
    (reserved,) = drain(engine)
    assert isinstance(reserved, Reserved)
    assert reserved == reserved_for(receiver, reserved.num_cached_tokens)
    assert num_blocks(receiver) == -(-len(prompt) // BLOCK), "no room for an answer"
    return receiver, reserved


@pytest.mark.parametrize(("num_arrived", "num_cached"), [(0, 0), (15, 0), (16, 16), (40, 32), (64, 64), (70, 64)])
def test_adopted_kv_is_found_by_who_comes_later(num_arrived: int, num_cached: int) -> None:
    engine = make_engine()
    prompt = numbers(1, 70)
    receiver, reserved = reserve_to_fill(engine, prompt)
    assert reserved.num_cached_tokens == 0
    write_prompt_kv(engine.runner.caches[0], receiver, (0,))
    assert engine.take_block_events() == []
    engine.adopt(receiver, num_arrived)
    engine.check()
    assert receiver.status is Status.RESERVED
    keys = block_keys(b"tenant", prompt[:num_cached])
    assert engine.take_block_events() == [Stored(key) for key in keys]
    engine.end(receiver)
    assert is_empty(engine)
    assert engine.pool.counts().cached == num_cached // BLOCK
    sequence = engine.add(make_spec([*prompt, 5], 4, name="after"), Purpose.GENERATE, 0.0)
    assert generated(drain(engine), sequence) == expected_tokens([*prompt, 5], 4)
    assert sequence.num_cached_tokens == num_cached


@pytest.mark.parametrize("num_tokens", [32, 40])
def test_what_is_here_already_is_not_reserved_again(num_tokens: int) -> None:
    engine = make_engine()
    prompt = numbers(1, num_tokens)
    engine.add(make_spec(prompt, 1), Purpose.GENERATE, 0.0)
    drain(engine)
    engine.take_block_events()
    receiver, reserved = reserve_to_fill(engine, prompt)
    assert reserved.num_cached_tokens == 32, "all its full blocks"
    engine.adopt(receiver, 16)  # less than is known: nothing is taken back
    engine.check()
    assert receiver.num_computed_tokens == 32
    assert engine.take_block_events() == []
    engine.end(receiver)
    assert is_empty(engine)


def test_adopting_what_was_computed_meanwhile_keeps_one_copy() -> None:
    engine = make_engine()
    prompt = numbers(1, 40)
    receiver, _ = reserve_to_fill(engine, prompt)
    engine.add(make_spec(prompt, 1, name="computed"), Purpose.GENERATE, 0.0)
    drain(engine)
    write_prompt_kv(engine.runner.caches[0], receiver, (0,))
    engine.adopt(receiver, 40)
    engine.check()
    assert len(engine.pool.keys()) == 2
    engine.end(receiver)
    assert is_empty(engine)


def test_adopted_in_parts_it_can_still_be_inserted() -> None:
    engine = make_engine()
    prompt = numbers(1, 70)
    receiver = engine.add(make_spec(prompt, 10), Purpose.RECEIVE, 0.0)
    drain(engine)
    write_prompt_kv(engine.runner.caches[0], receiver, (0,))
    for num_tokens in (20, 50):
        engine.adopt(receiver, num_tokens)
        assert len(engine.pool.keys()) == num_tokens // BLOCK
    (first,) = expected_tokens(prompt, 1)
    engine.insert(receiver, first, 0.0)
    assert [first, *generated(drain(engine), receiver)] == expected_tokens(prompt, 10)
    assert is_empty(engine)


def test_misused_adoption_is_asserted() -> None:
    engine = make_engine()
    sequence = engine.add(make_spec(numbers(1, 40), 0), Purpose.RECEIVE, 0.0)
    with pytest.raises(AssertionError, match="WAITING"):
        engine.adopt(sequence, 16)
    drain(engine)
    with pytest.raises(AssertionError, match="41 of 40 tokens have arrived"):
        engine.adopt(sequence, 41)


# -- leaving early -----------------------------------------------------------------------------------------------------


def test_ending_a_waiting_one() -> None:
    engine = make_engine(4)
    first = engine.add(make_spec(numbers(1, 50), 5), Purpose.GENERATE, 0.0)
    waiting = engine.add(make_spec(numbers(2, 50), 5, name="waiting"), Purpose.GENERATE, 0.0)
    step(engine)
    assert waiting.status is Status.WAITING
    engine.end(waiting)
    outputs = drain(engine)
    assert generated(outputs, waiting) == []
    assert finish_of(outputs) is FinishReason.LENGTH
    assert first.status is Status.FINISHED
    assert is_empty(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("purpose", [Purpose.GENERATE, Purpose.PREFILL])
def test_ending_between_two_steps(num_steps: int, purpose: Purpose) -> None:
    engine = make_engine()
    neighbour = engine.add(make_spec(numbers(1, 20), 20, name="neighbour"), Purpose.GENERATE, 0.0)
    outputs: list[Output] = []
    sequence = engine.add(make_spec(numbers(2, 100), 20), purpose, 0.0)
    for _ in range(num_steps):
        outputs += step(engine)
    engine.end(sequence)
    engine.check()
    assert sequence.status is Status.FINISHED
    assert sequence.block_ids == ()
    outputs += drain(engine)
    assert generated(outputs, neighbour) == expected_tokens(numbers(1, 20), 20)
    assert is_empty(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_ending_while_the_batch_executes(num_steps: int) -> None:
    engine = make_engine(with_state=True)
    sequence = engine.add(make_spec(numbers(2, 100), 20), Purpose.GENERATE, 0.0)
    for _ in range(num_steps):
        step(engine)
    batch, _ = engine.schedule(0.0)
    held = engine.pool.counts().in_use
    engine.end(sequence)
    engine.end(sequence)
    assert engine.pool.counts().in_use == held, "the executing batch still writes to them"
    engine.check()
    assert engine.commit(batch, engine.runner.execute(batch), 0.0) == []
    assert sequence.status.value == "finished"
    assert is_empty(engine)


def test_ending_a_reserved_one() -> None:
    engine = make_engine(with_state=True)
    receiver = engine.add(make_spec(numbers(2, 100), 20), Purpose.RECEIVE, 0.0)
    drain(engine)
    assert engine.pool.counts().in_use > 0
    engine.end(receiver)
    assert is_empty(engine)


def test_a_batch_that_cannot_be_executed_is_abandoned() -> None:
    engine = make_engine()
    one = engine.add(make_spec(numbers(1, 20), name="one"), Purpose.GENERATE, 0.0)
    two = engine.add(make_spec(numbers(2, 20), name="two"), Purpose.GENERATE, 0.0)
    outside = engine.add(make_spec(numbers(3, 40), name="outside"), Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    batch = StepInput(tuple(part for part in batch.parts if part.sequence_key != outside.key))
    outside.in_flight = False
    engine.end(two)
    assert engine.abandon(batch) == [one]
    engine.check()
    assert engine.pool.keys() == [], "nothing of a failed step may be found in the cache"
    engine.end(one)
    engine.end(outside)
    assert is_empty(engine)


def test_load_counts_what_is_left_to_compute() -> None:
    engine = make_engine(8, max_num_batched_tokens=32)
    engine.add(make_spec(numbers(1, 50), 10, name="running"), Purpose.GENERATE, 0.0)
    engine.add(make_spec(numbers(2, 70), 10, name="waiting"), Purpose.GENERATE, 0.0)
    step(engine)
    load = engine.load()
    assert (load.running, load.waiting, load.queued_tokens) == (1, 1, 18 + 70)
    assert load.blocks.in_use == 4


def test_what_is_cached_or_comes_from_elsewhere_is_not_left_to_compute() -> None:
    engine = make_engine(8, max_num_seqs=1, max_num_batched_tokens=100)
    first = engine.add(make_spec(numbers(1, 100), 10, name="first"), Purpose.GENERATE, 0.0)
    step(engine)
    engine.add(make_spec([*numbers(1, 100), *numbers(2, 20)], 10, name="next turn"), Purpose.GENERATE, 0.0)
    engine.add(make_spec(numbers(3, 50), 10, name="receiver"), Purpose.RECEIVE, 0.0)
    assert (engine.load().waiting, engine.load().queued_tokens) == (2, 1 + 120 - 96)
    engine.end(first)
    engine.pool.release(engine.pool.allocate((8,)) or ())
    assert engine.load().queued_tokens == 120, "evicted meanwhile"


def test_a_step_has_a_size() -> None:
    engine = make_engine(max_num_batched_tokens=40)
    engine.add(make_spec(numbers(1, 20), name="decodes"), Purpose.GENERATE, 0.0)
    step(engine)
    engine.add(make_spec(numbers(2, 60), name="prompt"), Purpose.GENERATE, 0.0)
    step(engine)
    engine.add(make_spec(numbers(3, 1), name="short"), Purpose.GENERATE, 0.0)
    batch, _ = engine.schedule(0.0)
    assert [(part.num_computed_tokens, part.num_scheduled_tokens) for part in batch.parts] == [
        (21, 1),
        (39, 21),
        (0, 1),
    ]
    num_pairs = sum(range(40, 61))  # a token attends to itself and to those before it
    assert batch.size() == StepSize(
        num_new=23,
        num_pairs=pytest.approx(num_pairs + 1, abs=25),  # type: ignore[arg-type]
        num_decoding=1,
        num_kv_tokens=22,
    )
    assert StepInput(()).size() == StepSize()


def test_an_engine_learns_what_its_steps_cost_and_plans_with_it() -> None:
    """Steps take what some worker's would; after a few of them the engine predicts those that it has not seen."""
    truth = step_costs(s_overhead=0.02, s_per_token=0.001, s_weights=0.03, s_per_sequence=0.002)
    engine = make_engine(num_blocks=256, max_num_batched_tokens=128)
    assert engine.load().costs == engine.scheduler.costs == PRIOR
    for number, num_tokens in enumerate((100, 70, 125, 40, 90, 60, 110, 80)):
        engine.add(make_spec(numbers(number, num_tokens), 30 + 5 * number, name=str(number)), Purpose.GENERATE, 0.0)
        for _ in range(4):
            batch, _ = engine.schedule(0.0)
            size = batch.size()
            engine.learn(size, truth.step_s(size.num_new, size.num_pairs, size.num_decoding, size.num_kv_tokens))
            engine.commit(batch, engine.runner.execute(batch), 0.0)
    learned = engine.load().costs
    assert learned is engine.scheduler.costs
    for num_decoding in (2, 5):
        for num_new in (num_decoding, 64, 120):
            expected = truth.step_s(num_new, 0, num_decoding, 0)
            assert learned.step_s(num_new, 0, num_decoding, 0) == pytest.approx(expected, rel=0.15)


def test_check_sees_a_leak() -> None:
    engine = make_engine()
    assert engine.pool.allocate((1,)) is not None
    with pytest.raises(AssertionError, match="1 blocks in use, 0 held"):
        engine.check()
    engine = make_engine()
    held = engine.add(make_spec([1, 2]), Purpose.PREFILL, 0.0)
    drain(engine)
    engine.pool.acquire(held.block_ids)
    with pytest.raises(AssertionError, match="more or fewer references than holders"):
        engine.check()
    engine = make_engine(with_state=True)
    assert engine.pool.allocate((0, 1)) is not None
    with pytest.raises(AssertionError, match="1 blocks in use, 0 held"):
        engine.check()


# -- anything, in any order --------------------------------------------------------------------------------------------


def write_prompt_kv(cache: KVCache, sequence: Sequence, begins: SequenceOf[int], num_tokens: int | None = None) -> None:
    """The KV of a prompt's first tokens, worked out by hand, as a transfer would leave it.

    Args:
        begins: of each layer group, the token from which it arrives.
        num_tokens: None: all tokens.
    """
    num_tokens = sequence.num_tokens if num_tokens is None else num_tokens
    for group, begin in enumerate(begins):
        for position in range(begin, num_tokens):
            token = sequence.token_ids[position]
            block, offset = sequence.block_ids[group][position // BLOCK], position % BLOCK
            pages = cache.groups[group].view(len(cache.spec.groups[group].layers), -1, 2, cache.spec.block_size)
            pages[:, block, 0, offset] = token
            pages[:, block, 1, offset] = (position + 1) * token
    for state in cache.states.values():
        state[sequence.block_ids[-1][0]] = sum(sequence.token_ids[:num_tokens])


class EngineMachine(RuleBasedStateMachine):
    """Every operation at every moment. All tokens stay exact, the books stay right, and nothing is left at the end."""

    with_state = False
    window = 0

    def __init__(self) -> None:
        super().__init__()
        self.names = map(str, itertools.count())
        self.now = 0.0
        self.batch: StepInput | None = None
        self.alive: dict[Sequence, list[int]] = {}
        """Of each sequence that its owner has not left: the tokens that came."""
        self.known: dict[int, Sequence] = {}
        self.reserved: dict[Sequence, tuple[int, ...]] = {}
        """Sequences that wait for KV, each with the token from which it is missing in each layer group."""
        self.adopted: set[Sequence] = set()
        """Those with a snapshot in the place of their state, which is not written any more."""
        self.admitted: set[Sequence] = set()
        self.finished: set[Sequence] = set()
        self.pins: list[tuple[Pin, list[int]]] = []
        """Blocks, and the leading tokens whose KV must be in them for as long as they are pinned."""

    @initialize(num_blocks=st.integers(5, 12), budget=st.integers(8, 64), reservation=st.sampled_from([0, 8, 64]))
    def start(self, num_blocks: int, budget: int, reservation: int) -> None:
        self.engine = make_engine(
            num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            output_reservation=reservation,
            with_state=self.with_state,
            window=self.window,
            snapshot_tokens=32,
        )

    @rule(
        purpose=st.sampled_from(Purpose),
        parts=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        tail=st.integers(0, 15),
        max_tokens=st.integers(1, 40),
        priority=st.integers(-1, 1),
        ttft_s=st.sampled_from([1.0, 30.0, math.inf]),
        itl_s=st.sampled_from([0.001, 1.0, math.inf]),
        num_expected_tokens=st.sampled_from([0, 5, 100]),
        stops_after=st.sampled_from([None, 0, 2, 7, 19]),
    )
    def add(
        self,
        purpose: Purpose,
        parts: list[int],
        tail: int,
        max_tokens: int,
        priority: int,
        ttft_s: float,
        itl_s: float,
        num_expected_tokens: int,
        stops_after: int | None,
    ) -> None:
        """Prompts are made of few different parts, so that they share prefixes. Some answers stop early."""
        prompt = self.prompt(parts) + numbers(2, tail)
        if len(prompt) >= self.engine.runner.max_model_len:
            return
        stops = () if stops_after is None else self.answers(prompt, stops_after + 1)[-1:]
        spec = make_spec(prompt, max_tokens, name=next(self.names), stop_token_ids=tuple(stops))
        spec = replace(spec, priority=priority, ttft_s=ttft_s, itl_s=itl_s, num_expected_tokens=num_expected_tokens)
        self.now += 1
        sequence = self.engine.add(spec, purpose, self.now)
        self.alive[sequence] = []
        self.known[sequence.key] = sequence

    @rule()
    @precondition(lambda self: self.batch is None)
    def schedule(self) -> None:
        batch, outputs = self.engine.schedule(self.now)
        self.take(outputs)
        self.batch = batch or None

    @rule()
    @precondition(lambda self: self.batch is not None)
    def commit(self) -> None:
        assert self.batch is not None
        self.engine.learn(self.batch.size(), 0.01 * len(self.batch.parts))
        self.take(self.engine.commit(self.batch, self.engine.runner.execute(self.batch), self.now))
        self.batch = None

    @rule(num_steps=st.integers(1, 20))
    def run_for_a_while(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.batch is None:
                self.schedule()
            if self.batch is not None:
                self.commit()
            self.engine.check()

    @rule()
    @precondition(lambda self: self.batch is not None)
    def fail(self) -> None:
        assert self.batch is not None
        for sequence in self.engine.abandon(self.batch):
            del self.alive[sequence]
        self.batch = None

    @rule(data=st.data())
    @precondition(lambda self: set(self.reserved) - self.adopted)
    def insert(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([each for each in self.reserved if each not in self.adopted]))
        write_prompt_kv(self.engine.runner.caches[0], sequence, self.reserved.pop(sequence))
        (first,) = self.expected(sequence, 1)
        self.alive[sequence].append(first)
        if self.engine.insert(sequence, first, self.now) is not None:
            self.finished.add(sequence)

    @rule(data=st.data())
    @precondition(lambda self: set(self.reserved) - self.adopted)
    def adopt(self, data: st.DataObject) -> None:
        """All of the KV has arrived, but only a part of it counts; without a state, the rest is written again."""
        sequence = data.draw(st.sampled_from([each for each in self.reserved if each not in self.adopted]))
        begins = self.reserved[sequence]
        num_tokens = data.draw(st.integers(max(begins), max(*begins, sequence.num_tokens)))
        write_prompt_kv(self.engine.runner.caches[0], sequence, begins, num_tokens)
        self.engine.adopt(sequence, num_tokens)
        if self.with_state:
            self.adopted.add(sequence)
        self.reserved[sequence] = tuple(max(begin, num_tokens // BLOCK * BLOCK) for begin in begins)

    @rule(data=st.data())
    @precondition(lambda self: self.alive)
    def pin(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.alive)))
        pin = self.engine.pin(sequence)
        assert self.window or pin.block_ids[:1] == sequence.block_ids[:1]
        assert not any(pin.block_ids[len(self.engine.pool.groups) :]), "a state's row is known at the end"
        num_there = min(sequence.num_computed_tokens, *self.reserved.get(sequence, (sequence.num_computed_tokens,)))
        self.pins.append((pin, sequence.token_ids[:num_there] if any(pin.block_ids) else []))

    @rule(parts=st.lists(st.integers(0, 1), min_size=2, max_size=4))
    def pin_prefix(self, parts: list[int]) -> None:
        tokens = self.prompt(parts)
        pin = self.engine.pin_prefix(block_keys(b"tenant", tokens))
        assert self.window or pin.num_tokens == len(pin.block_ids[0]) * BLOCK
        self.pins.append((pin, tokens[: pin.num_tokens]))

    @rule(data=st.data())
    @precondition(lambda self: self.pins)
    def unpin(self, data: st.DataObject) -> None:
        pin, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.engine.unpin(pin)

    @rule(data=st.data())
    @precondition(lambda self: self.alive)
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.alive)))
        self.engine.end(sequence)
        self.engine.end(sequence)
        del self.alive[sequence]
        self.reserved.pop(sequence, None)

    def prompt(self, parts: list[int]) -> list[int]:
        return [token for part in parts for token in numbers(part, 15)]

    def expected(self, sequence: Sequence, num_tokens: int) -> list[int]:
        return self.answers(sequence.spec.token_ids, num_tokens)

    def answers(self, prompt: SequenceOf[int], num_tokens: int) -> list[int]:
        return expected_tokens(prompt, num_tokens, with_state=self.with_state)

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            sequence = self.known[output.sequence_key]
            if isinstance(output, Preempted):
                assert sequence.purpose is not Purpose.PREFILL
                assert sequence.was_admitted
                continue
            if isinstance(output, Reserved):
                self.reserved[sequence] = output.begins or (output.num_cached_tokens,)
                continue
            if isinstance(output, Admitted):
                assert sequence.purpose is Purpose.PREFILL
                assert sequence not in self.admitted
                assert len(output.block_ids[0]) * BLOCK >= sequence.num_tokens
                self.admitted.add(sequence)
                continue
            assert isinstance(output, Generated)
            tokens = self.alive[sequence]
            assert sequence.purpose is not Purpose.PREFILL or sequence in self.admitted
            assert (output.report is not None) == (not tokens and sequence.purpose is not Purpose.RECEIVE)
            tokens += output.token_ids
            assert tokens == self.expected(sequence, len(tokens))
            at_end = len(tokens) == sequence.spec.max_tokens or sequence.num_tokens == self.engine.runner.max_model_len
            reason = FinishReason.LENGTH if at_end else None
            if tokens and tokens[-1] in sequence.spec.sampling.stop_token_ids:
                reason = FinishReason.STOP
            assert output.finish_reason is reason
            if output.finish_reason is not None:
                self.finished.add(sequence)

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()
            assert set(self.reserved) == set(self.engine.scheduler.reserved)
            assert not any(sequence.status is Status.WAITING for sequence in self.admitted), "a prefill was preempted"

    @invariant()
    def pinned_blocks_keep_their_content(self) -> None:
        if not self.pins:
            return
        cache = self.engine.runner.caches[0]
        for pin, tokens in self.pins:
            held = torch.tensor(tokens, dtype=torch.int64)
            weighted = held * torch.arange(1, len(tokens) + 1)
            for layer in range(cache.spec.num_layers):
                table = (pin.block_ids or ((), ()))[cache.group_of(layer)]
                begin = BLOCK * next((at for at, block in enumerate(table) if block != EMPTY_PLACE), 0)
                pages = cache.layer(layer).view(-1, 2, BLOCK)[list(table[begin // BLOCK :])]
                assert pages[:, 0].flatten()[: max(0, len(tokens) - begin)].equal(held[begin:])
                assert pages[:, 1].flatten()[: max(0, len(tokens) - begin)].equal(weighted[begin:])
            if pin.num_tokens and cache.states:
                assert cache.states["token_sum"][pin.block_ids[-1][0]] == sum(tokens)

    def teardown(self) -> None:
        """Whoever is still there gets all of its answer, once the transfers have ended; then nothing is left."""
        if not hasattr(self, "engine"):
            return
        for pin, _ in self.pins:
            self.engine.unpin(pin)
        for _ in range(2000):
            for sequence in [s for s in self.alive if s.status in (Status.HELD, Status.RESERVED)]:
                self.engine.end(sequence)
                self.reserved.pop(sequence, None)
                del self.alive[sequence]
            if self.batch is None:
                self.schedule()
            if self.batch is not None:
                self.commit()
            elif not self.reserved:
                break
            self.engine.check()
        unfinished = [sequence for sequence in self.alive if sequence not in self.finished]
        assert not unfinished, "the engine rests although there is work"
        assert is_empty(self.engine)


class EngineWithStateMachine(EngineMachine):
    with_state = True


class EngineWithWindowMachine(EngineMachine):
    window = 20


class EngineWithBothMachine(EngineMachine):
    with_state, window = True, 32


TestAnything = EngineMachine.TestCase
TestAnything.settings = settings(max_examples=60, stateful_step_count=40)
TestAnythingWithState = EngineWithStateMachine.TestCase
TestAnythingWithState.settings = settings(max_examples=40, stateful_step_count=40)
TestAnythingWithWindow = EngineWithWindowMachine.TestCase
TestAnythingWithWindow.settings = settings(max_examples=40, stateful_step_count=40)
TestAnythingWithBoth = EngineWithBothMachine.TestCase
TestAnythingWithBoth.settings = settings(max_examples=40, stateful_step_count=40)
