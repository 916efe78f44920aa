"""Stale hints: what counts as one, and what the mirror takes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.blocks import block_keys
from baton.cluster import Role
from baton.telemetry.instruments import Instruments
from kvstore.index import BlockEvent, Mirror, Op
from router.placement import Prompt
from router.placement.pool_view import HintTracker
from tests.support.builders import cluster_status, sequence_spec, worker

WORKER = worker("w", Role.PREFILL, epoch=1, block_size=16)
SPEC = sequence_spec(range(100))
PROMPT = Prompt(100, tuple(block_keys(SPEC.cache_seed, SPEC.token_ids)))


class Router:
    """A mirror that believes that "w" holds the whole prompt, and the book beside it."""

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.instruments = Instruments(cluster_status)
        self.hints = HintTracker(self.mirror, self.instruments)
        self.mirror.apply(BlockEvent(worker_id="w", epoch=1, seq=1, op=Op.STORED, keys=PROMPT.block_keys))

    def counted(self) -> tuple[int, int]:
        """Stale hints, and stale tokens."""
        values = {"baton_index_stale_hints_total": 0, "baton_index_stale_tokens_total": 0}
        for line in self.instruments.exposition().decode().splitlines():
            name, _, value = line.partition(" ")
            if name in values:
                values[name] = int(float(value))
        hints, tokens = values.values()
        return hints, tokens

    def believed(self) -> int:
        self.mirror.check()
        return self.mirror.lookup(PROMPT.block_keys).get("w", 0)


@pytest.fixture
def router() -> Router:
    return Router()


def test_a_worker_that_held_less_is_counted_and_no_longer_believed(router: Router) -> None:
    hint = router.hints.note(SPEC, PROMPT, WORKER, 96)
    router.hints.settle(hint, 32)
    assert router.counted() == (1, 64)
    assert router.believed() == 2


def test_an_event_that_came_since_is_not_undone(router: Router) -> None:
    hint = router.hints.note(SPEC, PROMPT, WORKER, 96)
    router.mirror.apply(BlockEvent(worker_id="w", epoch=1, seq=2, op=Op.REMOVED, keys=PROMPT.block_keys[2:]))
    router.mirror.apply(BlockEvent(worker_id="w", epoch=1, seq=3, op=Op.STORED, keys=PROMPT.block_keys[2:]))
    router.hints.settle(hint, 32)
    assert router.counted() == (1, 64)
    assert router.believed() == 6


def test_an_event_that_comes_later_is_believed_again(router: Router) -> None:
    router.hints.settle(router.hints.note(SPEC, PROMPT, WORKER, 96), 0)
    assert router.believed() == 0
    router.mirror.apply(BlockEvent(worker_id="w", epoch=1, seq=2, op=Op.STORED, keys=PROMPT.block_keys))
    assert router.believed() == 6


def test_of_resume_points_those_after_the_one_that_was_used_are_taken_back(router: Router) -> None:
    router.mirror.apply(BlockEvent(worker_id="w", epoch=1, seq=2, op=Op.REMOVED, keys=PROMPT.block_keys))
    points = (PROMPT.block_keys[1], PROMPT.block_keys[3], PROMPT.block_keys[5])
    router.mirror.apply(BlockEvent(worker_id="w", epoch=1, seq=3, op=Op.STORED, keys=points))

    def believed() -> int:
        return router.mirror.lookup(PROMPT.block_keys, resumes_anywhere=False).get("w", 0)

    router.hints.settle(router.hints.note(SPEC, PROMPT, WORKER, 96), 32)
    assert (believed(), router.counted()) == (2, (1, 64))
    router.hints.settle(router.hints.note(SPEC, PROMPT, WORKER, 32), 32)
    assert (believed(), router.counted()) == (2, (1, 64))


def test_a_new_incarnation_owes_nothing_to_the_old_ones_hint(router: Router) -> None:
    hint = router.hints.note(SPEC, PROMPT, WORKER, 96)
    router.mirror.apply(BlockEvent(worker_id="w", epoch=2, seq=1, op=Op.STORED, keys=PROMPT.block_keys))
    router.hints.settle(hint, 0)
    assert router.believed() == 6


@pytest.mark.parametrize("num_found", [96, 112])
def test_who_held_as_much_or_more_is_not_stale(router: Router, num_found: int) -> None:
    router.hints.settle(router.hints.note(SPEC, PROMPT, WORKER, 96), num_found)
    assert router.counted() == (0, 0)
    assert router.believed() == 6


def test_the_last_token_is_computed_whatever_is_held(router: Router) -> None:
    """A prompt of whole blocks, all of them cached: the worker reports one block less, and was right to."""
    spec = replace(SPEC, token_ids=SPEC.token_ids[:96], num_prompt_tokens=96)
    router.hints.settle(router.hints.note(spec, PROMPT, WORKER, 96), 80)
    assert router.counted() == (0, 0)
    assert router.believed() == 6


def test_an_answer_that_goes_on_elsewhere_is_not_judged(router: Router) -> None:
    """Workers report what they found of the prompt alone, but all that they pulled."""
    continued = replace(SPEC, num_prompt_tokens=40)
    router.hints.settle(router.hints.note(continued, PROMPT, WORKER, 48), max(0, 40 - 48))
    assert router.counted() == (0, 0)


def test_blocks_of_another_size_are_counted_in_tokens(router: Router) -> None:
    large = replace(WORKER, info=replace(WORKER.info, block_size=32))
    prompt = Prompt(100, tuple(block_keys(SPEC.cache_seed, SPEC.token_ids, 32)))
    router.hints.settle(router.hints.note(SPEC, prompt, large, 96), 32)
    assert router.counted() == (1, 64)
