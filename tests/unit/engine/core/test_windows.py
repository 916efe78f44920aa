"""Layers with a window: their blocks return to the pool while a sequence runs, and few are needed to continue."""

from __future__ import annotations

import pytest

from engine.core.engine import Engine
from engine.core.outputs import Reserved
from engine.core.runner import EMPTY_PLACE
from engine.core.sequence import Purpose, Sequence
from engine.testing import expected_tokens
from tests.unit.engine.core.test_engine import (
    BLOCK,
    drain,
    generated,
    is_empty,
    make_engine,
    make_spec,
    numbers,
    step,
    write_prompt_kv,
)

WINDOW = 64


def windowed(num_blocks: int = 512, window: int = WINDOW, **values: int) -> Engine:
    return make_engine(num_blocks, window=window, **values)


def held(sequence: Sequence) -> list[int]:
    """Number of blocks that a sequence holds in each group."""
    return [sum(block != EMPTY_PLACE for block in table) for table in sequence.block_ids]


@pytest.mark.parametrize("num_prompt_tokens", [4096, 4095, 1000])
def test_a_long_sequence_holds_all_of_one_group_and_a_window_of_the_other(num_prompt_tokens: int) -> None:
    engine = windowed(output_reservation=0, max_num_batched_tokens=256)
    sequence = engine.add(make_spec(numbers(1, num_prompt_tokens), 3), Purpose.GENERATE, 0.0)
    while sequence.num_computed_tokens < num_prompt_tokens:
        step(engine)
        passed = max(0, sequence.num_computed_tokens - WINDOW) // BLOCK
        assert set(sequence.block_ids[1][:passed]) <= {EMPTY_PLACE}
    num_blocks = -(-num_prompt_tokens // BLOCK)
    first = (num_prompt_tokens // BLOCK * BLOCK - WINDOW) // BLOCK
    assert held(sequence) == [num_blocks, num_blocks - first]
    assert engine.pool.pools[1].counts().in_use == num_blocks - first
    drain(engine)
    assert is_empty(engine)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 64, 200])
def test_every_token_is_exact_at_any_window(window: int) -> None:
    """The arithmetic model counts each position of the window that is not there."""
    engine = windowed(64, window, max_num_batched_tokens=24)
    prompts = [numbers(n, length) for n, length in enumerate([1, 30, 90, 150])]
    sequences = [
        engine.add(make_spec(prompt, 50, name=str(n)), Purpose.GENERATE, 0.0) for n, prompt in enumerate(prompts)
    ]
    outputs = drain(engine)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert generated(outputs, sequence) == expected_tokens(prompt, 50)
    assert is_empty(engine)


def test_a_prefix_needs_the_blocks_of_its_window_only() -> None:
    """The pool of the window has evicted the blocks that left it long ago. A prompt continues without them."""
    engine, prompt = windowed(256), numbers(1, 320)
    first = engine.add(make_spec(prompt, 2, name="first"), Purpose.GENERATE, 0.0)
    drain(engine)
    pool = engine.pool.pools[1]
    early = [pool.match([key])[0] for key in first.block_keys[:12]]
    taken = pool.allocate(pool.counts().free + len(early))
    assert taken is not None
    assert set(early) <= set(taken), "they are the first to be evicted"
    pool.release(taken)
    again = engine.add(make_spec([*prompt, *numbers(2, 10)], 5, name="again"), Purpose.GENERATE, 0.0)
    assert generated(drain(engine), again) == expected_tokens(again.spec.token_ids, 5)
    assert again.num_cached_tokens == 320
    assert again.spec.token_ids[:320] == tuple(prompt)


def test_a_prefix_without_its_window_is_cut_to_one_that_has_it() -> None:
    engine, prompt = windowed(256), numbers(1, 320)
    first = engine.add(make_spec(prompt, 2, name="first"), Purpose.GENERATE, 0.0)
    drain(engine)
    pool = engine.pool.pools[1]
    pool.forget(first.block_keys[17])
    assert engine.num_cached_tokens(first.block_keys) == 17 * BLOCK
    again = engine.add(make_spec([*prompt, 5], 5, name="again"), Purpose.GENERATE, 0.0)
    assert generated(drain(engine), again) == expected_tokens(again.spec.token_ids, 5)
    assert again.num_cached_tokens == 17 * BLOCK


@pytest.mark.parametrize("num_tokens", [40, 64, 65, 100, 200])
def test_a_receiver_wants_the_window_at_the_end(num_tokens: int) -> None:
    engine, prompt = windowed(64), numbers(1, num_tokens)
    receiver = engine.add(make_spec(prompt, 10), Purpose.RECEIVE, 0.0)
    (reserved,) = drain(engine)
    assert isinstance(reserved, Reserved)
    assert reserved.begins == (0, max(0, num_tokens - WINDOW) // BLOCK * BLOCK)
    assert reserved.block_ids[1][: reserved.begins[1] // BLOCK] == (EMPTY_PLACE,) * (reserved.begins[1] // BLOCK)
    write_prompt_kv(engine.runner.caches[0], receiver, reserved.begins)
    first, *rest = expected_tokens(prompt, 10)
    assert engine.insert(receiver, first, 0.0) is None
    assert generated(drain(engine), receiver) == rest
    again = engine.add(make_spec([*prompt, *numbers(2, 20)], 5, name="again"), Purpose.GENERATE, 0.0)
    assert generated(drain(engine), again) == expected_tokens(again.spec.token_ids, 5)
    assert again.num_cached_tokens == num_tokens // BLOCK * BLOCK
    assert is_empty(engine)


def test_the_last_token_may_be_computed_again_at_the_edge_of_a_window() -> None:
    """A receiver that samples its first token itself computes its last known token, one window further back."""
    for num_tokens in range(60, 100):
        engine, prompt = windowed(64), numbers(num_tokens, num_tokens)
        receiver = engine.add(make_spec(prompt, 3), Purpose.RECEIVE, 0.0)
        (reserved,) = drain(engine)
        assert isinstance(reserved, Reserved)
        write_prompt_kv(engine.runner.caches[0], receiver, reserved.begins)
        engine.insert(receiver, None, 0.0)
        assert generated(drain(engine), receiver) == expected_tokens(prompt, 3)


def test_a_receiver_says_what_it_has_of_each_group() -> None:
    engine, prompt = windowed(256), numbers(1, 200)
    first = engine.add(make_spec(prompt, 2, name="first"), Purpose.GENERATE, 0.0)
    drain(engine)
    for place, begins in ((None, (192, 192)), (10, (192, 160))):
        if place is not None:
            engine.pool.pools[1].forget(first.block_keys[place])
        receiver = engine.add(make_spec(prompt, 10, name=str(place)), Purpose.RECEIVE, 0.0)
        (reserved,) = drain(engine)
        assert isinstance(reserved, Reserved)
        assert (reserved.num_cached_tokens, reserved.begins) == (192, begins)
        engine.end(receiver)


def test_a_fork_far_behind_is_refused_and_computed() -> None:
    """The parent has given back blocks that the child would see."""
    engine, prompt = windowed(256), numbers(1, 40)
    parent = engine.add(make_spec(prompt, 200), Purpose.GENERATE, 0.0)
    for _ in range(150):
        step(engine)
    near, far = parent.token_ids[: parent.num_computed_tokens + 1], parent.token_ids[:60]
    assert engine.fork(parent, make_spec(far, 10, name="far"), 0.0) is None
    child = engine.fork(parent, make_spec(near, 10, name="near"), 0.0)
    assert child is not None
    assert generated(drain(engine), child) == expected_tokens(near, 10)
    assert is_empty(engine)


def test_a_pin_leaves_out_what_no_transfer_reads() -> None:
    """Blocks before the window at a prompt's end come back while the prompt is computed, though it is pinned."""
    engine, prompt = windowed(256), numbers(1, 200)
    sequence = engine.add(make_spec(prompt, 5), Purpose.PREFILL, 0.0)
    engine.schedule(0.0)
    pin = engine.pin(sequence)
    first = (200 - WINDOW) // BLOCK
    assert pin.block_ids == (sequence.block_ids[0], (EMPTY_PLACE,) * first + sequence.block_ids[1][first:])
