"""What weights that were made smaller do to a model's predictions, on passages of this repository's documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from baton.engine.core.runner import Runner, StepPart, ignore_layer
from baton.engine.model.logits_runner import NO_SAMPLING, LogitsRunner
from baton.engine.model.rank_step import RankStep
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


def table(exact: Runner, rounded: Runner, prompts: Sequence[list[int]]) -> Table:
    """Compares two runners of a model.

    Args:
        prompts: passages, as tokens; those behind `PASSAGE_TOKENS` are not read.
    """
    divergences, agreements = [], []
    for prompt in prompts:
        expected, found = (_log_probabilities(runner, prompt[:PASSAGE_TOKENS]) for runner in (exact, rounded))
        divergences.append(float((expected.exp() * (expected - found)).sum(-1).mean()))
        agreements.append(float((expected.argmax(-1) == found.argmax(-1)).double().mean()))
    divergence, agreement = (sum(values) / len(values) for values in (divergences, agreements))
    kept = Table(
        f"Quality of int8g weights against float32, {len(prompts)} passages of {PASSAGE_TOKENS} tokens",
        ("", "mean", "of passages", "gate", "kept"),
    )
    kept.rows += [
        ("KL divergence, nats a token", f"{divergence:.4f}", spread(divergences), f"<= {MOST_DIVERGENCE}",
         "yes" if divergence <= MOST_DIVERGENCE else "no"),
        ("same most probable token", f"{agreement:.4f}", spread(agreements), f">= {LEAST_AGREEMENT}",
         "yes" if agreement >= LEAST_AGREEMENT else "no"),
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
