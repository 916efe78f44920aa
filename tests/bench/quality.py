"""What weights that were made smaller do to a model's predictions, on passages of this repository's documentation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.core.runner import Runner, StepPart, ignore_layer
from engine.model.logits_runner import NO_SAMPLING, LogitsRunner
from engine.model.rank_step import RankStep
from tests.bench.report import Table
from tests.bench.stats import spread

DOCS = Path(__file__).parents[2] / "docs"
NUM_PASSAGES = 24
PASSAGE_TOKENS = 256
MOST_DIVERGENCE, LEAST_AGREEMENT = 0.01, 0.95


def passages() -> list[str]:
    """The begins of pages, and then their second halves, each longer than what is read of it."""
    pages = [page.read_text() for page in sorted(DOCS.rglob("*.md"))]
    found = [*pages, *(page[len(page) // 2 :] for page in pages)]
    return [passage for passage in found if len(passage) > 8 * PASSAGE_TOKENS][:NUM_PASSAGES]


@dataclass(frozen=True, slots=True)
class Quality:
    """How near predictions are to exact ones: of each passage, the means over its tokens."""

    divergences: Sequence[float]
    """Kullback-Leibler divergence, in nats a token."""
    agreements: Sequence[float]
    """The share of tokens after which the most probable one is the same."""

    @property
    def divergence(self) -> float:
        return statistics.fmean(self.divergences)

    @property
    def agreement(self) -> float:
        return statistics.fmean(self.agreements)

    @property
    def is_near(self) -> bool:
        return self.divergence <= MOST_DIVERGENCE and self.agreement >= LEAST_AGREEMENT


def compared(exact: Runner, other: Runner, prompts: Sequence[list[int]]) -> Quality:
    """Compares two runners of a model on passages, which are tokens."""
    divergences, agreements = [], []
    for prompt in prompts:
        expected, found = (_log_probabilities(runner, prompt) for runner in (exact, other))
        divergences.append(float((expected.exp() * (expected - found)).sum(-1).mean()))
        agreements.append(float((expected.argmax(-1) == found.argmax(-1)).double().mean()))
    return Quality(divergences, agreements)


def table(found: Mapping[str, Quality]) -> Table:
    """Returns what was found of each by its name."""
    num_passages = max(len(quality.divergences) for quality in found.values())
    kept = Table(
        f"Predictions against float32's, {num_passages} passages of {PASSAGE_TOKENS} tokens",
        ("", "mean", "of passages", "gate", "kept"),
    )
    for name, quality in found.items():
        kept.rows += [
            (f"{name}: KL divergence, nats a token", f"{quality.divergence:.4f}", spread(quality.divergences),
             f"<= {MOST_DIVERGENCE}", "yes" if quality.divergence <= MOST_DIVERGENCE else "no"),
            (f"{name}: same most probable token", f"{quality.agreement:.4f}", spread(quality.agreements),
             f">= {LEAST_AGREEMENT}", "yes" if quality.agreement >= LEAST_AGREEMENT else "no"),
        ]  # fmt: skip
    return kept


@torch.inference_mode()
def _log_probabilities(runner: Runner, prompt: list[int]) -> torch.Tensor:
    """Returns those of each token's successors, `[tokens, vocabulary]` in float64."""
    assert isinstance(runner, LogitsRunner), "its logits are compared"
    part = StepPart(
        sequence_key=0,
        token_ids=tuple(prompt),
        num_computed_tokens=0,
        block_ids=(tuple(range(-(-len(prompt) // runner.spec.block_size))),),
        num_kv_tokens=(len(prompt),),
        sample=True,
        is_decoding=False,
        sampling=NO_SAMPLING,
        choice_index=0,
        num_prompt_tokens=len(prompt),
    )
    last, *others = runner._compute(RankStep([part], [0], (), [len(prompt) - 1]), ignore_layer)
    return torch.stack([*others, last]).double().log_softmax(-1)
