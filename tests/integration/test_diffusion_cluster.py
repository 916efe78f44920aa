"""A cluster of real processes serves a model that denoises canvases, and goes on as a decode worker leaves or dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.integration.cluster import running_cluster
from tests.integration.test_diffusion import SEED, folder, model, prompts, require_same
from tests.integration.test_engine_models import Reference
from tests.integration.test_families_cluster import (
    Served,
    require_answers_through_a_drain,
    require_answers_through_a_kill,
)
from tests.support.asking import metric, sampling
from tests.support.diffusion import generated

__all__ = ["folder", "model"]
pytestmark = [pytest.mark.first, pytest.mark.integration]
NUM_TOKENS = 256
"""Tokens of each answer, in the middle of which a worker leaves or dies."""


@pytest.fixture(scope="module")
def served(folder: Path, model: Any) -> Iterator[Served]:
    long = [generated(model, prompt, NUM_TOKENS, 0, is_drawn=False)[0] for prompt in prompts()]
    with running_cluster(
        *("--model", str(folder)),
        cluster_decode="2",
        engine_num_blocks="320",
        router_mode="disaggregated",
        router_slo_classes='{"default": {"ttft_ms": 600000, "itl_ms": 600000}}',
    ) as cluster:
        yield Served(
            cluster=cluster,
            # Rounding may change a draw anywhere: each place counts as a near tie.
            references=[Reference(tokens, [0.0] * len(tokens)) for tokens in long],
            prompts=prompts(),
            num_tokens=NUM_TOKENS,
        )


def test_a_cluster_answers_with_the_kv_that_was_transferred(served: Served, model: Any) -> None:
    got, expected = [], []
    for prompt in prompts():
        answer = served.cluster.generate(token_ids=prompt, sampling=sampling(24, temperature=1, seed=SEED))
        assert answer.timing.mode == "disaggregated"
        assert answer.usage.completion_tokens == 24
        got.append(answer.token_ids)
        expected.append(generated(model, prompt, 24, SEED)[0])
    require_same(got, expected)
    assert metric(served.cluster, "baton_transfer_bytes_total") > 0


def test_what_needs_one_token_after_another_is_refused_by_the_router(served: Served) -> None:
    with pytest.raises(grpc.RpcError, match="top_p needs a model that draws one token after another"):
        served.cluster.generate(token_ids=[5, 6], sampling=sampling(4, temperature=1, top_p=0.5))


@pytest.mark.chaos
def test_answers_go_on_with_their_kv_as_a_worker_drains(served: Served) -> None:
    require_answers_through_a_drain(served)


@pytest.mark.chaos
def test_answers_go_on_as_a_worker_dies(served: Served) -> None:
    require_answers_through_a_kill(served)
