"""Models with eyes answer prompts with images as transformers' `generate`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.config import EngineConfig
from baton.messages import SequenceSpec
from engine.core.engine import Engine
from tests.integration.test_engine_models import ENGINE, answers, make_engine, same_up_to_near_ties, tokens_of
from tests.support.builders import sequence_spec
from tests.support.pictures import KINDS, Prompt, picture, placed, refer, save_with_eyes, written

pytestmark = pytest.mark.integration
NUM_TOKENS = 12
Part = int | bytes


@dataclass(frozen=True)
class Saved:
    """A folder and its model, which is the reference."""

    kind: str
    folder: Path
    model: Any

    def refer(self, parts: Sequence[Part], num_tokens: int = NUM_TOKENS) -> Any:
        return refer(self.model, written(self.kind, parts), num_tokens)

    def written(self, parts: Sequence[Part]) -> Prompt:
        return written(self.kind, parts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    @cache
    def make(kind: str) -> Saved:
        folder = tmp_path_factory.mktemp(kind)
        return Saved(kind, folder, save_with_eyes(kind, folder))

    return make


def text(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(30, 490) for _ in range(length)]


def spec_of(engine: Engine, name: str, parts: Sequence[Part], **values: Any) -> SequenceSpec:
    store = engine.runner.images
    assert not isinstance(store, str), store
    fields = placed([part if isinstance(part, int) else store.look(part) for part in parts])
    return sequence_spec(request_id=name, **{"max_tokens": NUM_TOKENS} | fields | values)


def prompts() -> list[list[Part]]:
    wide, high, small = picture(1), picture(2, 80, 190), picture(3, 40, 40)
    return [
        [*text(1, 5), wide, *text(2, 9)],
        text(3, 40),
        [*text(4, 3), high, *text(5, 4), wide, *text(6, 20), small, *text(7, 2)],
        [small, *text(8, 1)],
        [*text(9, 70), wide, *text(10, 33)],
        text(11, 3),
    ]


def num_same(saved: Saved, engine: Engine, prompts: Sequence[Sequence[Part]], steps_between: int = 1) -> int:
    specs = [spec_of(engine, str(number), parts) for number, parts in enumerate(prompts)]
    for spec, parts in zip(specs, prompts, strict=True):
        assert list(spec.token_ids) == saved.written(parts).token_ids
    found, _ = answers(engine, specs, steps_between)
    references = [saved.refer(parts) for parts in prompts]
    assert len({token for each in references for token in each.tokens}) > 20, "answers of few tokens are no test"
    return sum(map(same_up_to_near_ties, found, references))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_answers_as_generate(kind: str, saved: Callable[[str], Saved]) -> None:
    model = saved(kind)
    assert num_same(model, make_engine(model.folder), prompts()) >= 5
