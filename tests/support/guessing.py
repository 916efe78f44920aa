"""Guesses at answers that are known, some of them wrong, so that drafts are taken and rejected everywhere."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from baton.costs import StepCosts, StepSize
from baton.messages import SequenceSpec
from baton.sampling import FinishReason
from baton.scores import TokenScores
from engine.core.drafting import DraftPrice
from engine.core.engine import Engine
from engine.core.ngrams import NO_GUESS, Guess, NgramIndex
from engine.core.outputs import Generated, Output
from engine.core.runner import StepInput
from engine.core.sequence import Purpose
from engine.core.sequence import Sequence as EngineSequence

STEP_S = 0.01


class FixedPrice(DraftPrice):
    """A price that no step changes, beside steps of 10 ms.

    Args:
        price: in tokens.
    """

    def __init__(self, price: float) -> None:
        super().__init__()
        self._price = price

    def of(self, num_decoding: int, num_drafts: int) -> float:
        return self._price

    def most(self, num_decoding: int) -> int:
        return 10**6

    def token_s(self, num_decoding: int) -> float | None:
        return STEP_S / max(1, num_decoding)

    def observe(self, size: StepSize, costs: StepCosts, took_s: float) -> None:
        pass


FREE = FixedPrice(0.0)
"""Drafts cost nothing: each one that may be right is taken."""


class Known(NgramIndex):
    """Knows a sequence's tokens, and guesses wrong at times.

    Args:
        token_ids: all tokens, prompt and answer.
        wrong: share of the guesses that are none of the answer's tokens.
        vocab_size: guesses are less.
    """

    def __init__(self, token_ids: Sequence[int], seed: int, wrong: float = 0.2, vocab_size: int = 2) -> None:
        super().__init__(1)
        self._known = token_ids
        self._random = random.Random(seed)
        self._wrong = wrong
        self._vocab_size = vocab_size

    def read(self, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        assert list(token_ids) == list(self._known[: len(token_ids)]), "the answer is another one"
        return True

    def guess(self, token_ids: Sequence[int], most: int) -> Guess:
        if self._random.random() < 0.1:
            return NO_GUESS
        number = len(token_ids)
        right = [*self._known[number : number + self._random.randint(1, most)], 1, 1][:most]
        guessed = [
            self._random.randrange(self._vocab_size) if self._random.random() < self._wrong else token_id
            for token_id in right
        ]
        return Guess(tuple(guessed), tuple(0.9**place for place in range(1, len(guessed) + 1)))


class Told:
    """What an engine has answered: tokens, scores and end."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.scores = TokenScores()
        self.finish_reason: FinishReason | None = None

    def take(self, output: Generated) -> None:
        self.token_ids += output.token_ids
        self.scores = TokenScores.joined([self.scores, output.scores])
        self.finish_reason = output.finish_reason

    @property
    def values(self) -> tuple[list[int], TokenScores, FinishReason | None]:
        return self.token_ids, self.scores, self.finish_reason


def run(
    engine: Engine,
    specs: Iterable[SequenceSpec],
    known: Mapping[str, Known] | None = None,
    ahead: random.Random | None = None,
) -> tuple[list[Told], list[Output]]:
    """Runs all, and checks the books after each step. Returns each one's answer, and what else the engine said.

    Args:
        known: what guesses, by the sequence's id; None: nothing, or the engine itself.
        ahead: draws whether a step is planned before the one before it is executed, or before it is committed, or after
            that; None: all are planned after that.
    """
    if known and engine.scheduler.drafter is not None:
        engine.scheduler.drafter.price = FREE
    added: list[EngineSequence] = []
    for spec in specs:
        added.append(engine.add(spec, Purpose.GENERATE, float(len(added))))
        added[-1].ngrams = (known or {}).get(spec.sequence_id)
    told = {sequence.key: Told() for sequence in added}
    others: list[Output] = []

    def take(outputs: Iterable[Output]) -> None:
        for output in outputs:
            if isinstance(output, Generated):
                told[output.sequence_key].take(output)
            else:
                others.append(output)
        engine.check()

    batch, following = StepInput(()), StepInput(())
    for now in range(10_000):
        if not following:
            following, said = engine.schedule(float(now))
            take(said)
        batch, following = following, StepInput(())
        if not batch:
            return list(told.values()), others
        assert batch.num_scheduled_tokens <= engine.scheduler.limits.max_num_batched_tokens
        is_executed = ahead is not None and ahead.random() < 0.5
        output = engine.runner.execute(batch) if is_executed else None
        if ahead is not None and ahead.random() < 0.8 and (planned := engine.schedule_ahead(batch, float(now))):
            following, said = planned
            take(said)
        take(engine.commit(batch, output or engine.runner.execute(batch), float(now)))
    raise AssertionError("the engine does not come to rest")
