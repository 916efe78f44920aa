"""Models with recurrent layers answer as `generate`: their states are in rows of the KV cache.

A row is never changed by the step that reads it, so the steps of these tests can fail anywhere and be computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.blocks import num_blocks_for
from baton.config import EngineConfig, ModelConfig
from baton.sampling import SamplingParams
from engine.core.kv_spec import EMPTY_PLACE, BlockTables
from engine.core.runner import StepInput, StepPart
from engine.model.transformers_runner import TransformersRunner
from tests.integration.test_engine_models import load_reference, refer, same_up_to_near_ties
from tests.integration.test_families import prompts, save_untied
from tests.support.families import RECURRENT, WHOLE_PROMPTS

pytestmark = pytest.mark.integration

TYPES = RECURRENT | WHOLE_PROMPTS
LENGTH = {"max_model_len": 512}
"""A model without attention has no limit of its own."""


def runner_of(kind: str, folder: Path, **engine: Any) -> TransformersRunner:
    values: dict[str, Any] = {"num_blocks": 96, "max_num_seqs": 8, "max_num_batched_tokens": 48} | LENGTH | engine
    save_untied(kind, TYPES[kind], folder)
    return TransformersRunner(ModelConfig(path=str(folder), device="cpu"), EngineConfig(**values))


@dataclass
class Kept:
    """A sequence with blocks and rows of its own; its two rows take turns."""

    key: int
    tokens: list[int]
    num_prompt_tokens: int
    num_computed: int = 0
    num_steps: int = 0

    def tables(self, runner: TransformersRunner, end: int) -> BlockTables:
        each = runner.num_blocks[0] // 8
        blocks = [
            range(self.key * each, self.key * each + num_blocks_for(end, g.block_size)) for g in runner.spec.groups
        ]
        read, write = (2 * self.key + (self.num_steps + 1) % 2, 2 * self.key + self.num_steps % 2)
        return (*map(tuple, blocks), (read if self.num_computed else EMPTY_PLACE, write))

    def part(self, runner: TransformersRunner, most: int) -> StepPart:
        begin, end = self.num_computed, min(len(self.tokens), self.num_computed + most)
        return StepPart(
            sequence_key=self.key,
            token_ids=tuple(self.tokens[begin:end]),
            num_computed_tokens=begin,
            block_ids=self.tables(runner, end),
            num_kv_tokens=(end,) * runner.spec.num_tables,
            sample=end == len(self.tokens),
            is_decoding=end == len(self.tokens) > self.num_prompt_tokens,
            sampling=SamplingParams(temperature=0.0),
            choice_index=0,
            num_prompt_tokens=self.num_prompt_tokens,
        )


@dataclass
class Driver:
    """Computes sequences in mixed steps of at most `chunk` tokens of each."""

    runner: TransformersRunner
    chunk: int
    running: list[Kept] = field(default_factory=list)

    def step(self) -> None:
        parts = [each.part(self.runner, self.chunk) for each in self.running]
        output = self.runner.execute(StepInput(tuple(parts)))
        for each, part, sampled in zip(self.running, parts, output.sampled_token_ids, strict=True):
            each.num_computed, each.num_steps = part.end, each.num_steps + 1
            each.tokens += sampled


def driven(runner: TransformersRunner, asked: list[list[int]], num_tokens: int, chunk: int) -> Iterator[list[int]]:
    """Yields the answers to prompts, one of which arrives with each step."""
    driver, waiting = Driver(runner, chunk), [Kept(key, list(p), len(p)) for key, p in enumerate(asked)]
    done = list[Kept]()
    while waiting or driver.running:
        driver.running += waiting[:1]
        del waiting[:1]
        driver.step()
        ended = [each for each in driver.running if len(each.tokens) == each.num_prompt_tokens + num_tokens]
        done += ended
        driver.running = [each for each in driver.running if each not in ended]
    for each in sorted(done, key=lambda each: each.key):
        yield each.tokens[each.num_prompt_tokens :]


@pytest.mark.parametrize("kind", RECURRENT)
def test_the_states_of_a_mixed_batch_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    runner = runner_of(kind, tmp_path, num_blocks=128)
    reference = load_reference(tmp_path)
    found = list(driven(runner, prompts(), 12, 48))
    expected = [refer(reference, prompt, 12) for prompt in prompts()]
    assert sum(map(same_up_to_near_ties, found, expected)) >= 4
    assert len(set(expected[3].tokens)) >= 6, "an answer of one token is no test"
