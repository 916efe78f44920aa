"""A cluster of real processes serves a model of each kind: disaggregated, and through the death of a decode worker."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.integration.cluster import Answer, Cluster, request, running_cluster
from tests.integration.test_engine_models import VOCAB_SIZE, load_reference, refer, same_up_to_near_ties, save_tiny
from tests.integration.test_families import prompts
from tests.support.asking import sampling
from tests.support.families import KINDS
from tests.support.model_folders import backend
from tests.support.processes import command_line

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(600)]
NUM_TOKENS = 200


def decode_workers(cluster: Cluster) -> dict[str, psutil.Process]:
    """The processes of decode workers by the worker's id."""
    ids = cluster.ids("decode")
    found = {each: process for process in cluster.processes() for each in ids if each in command_line(process)}
    assert set(found) == set(ids)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_transformers_though_a_worker_dies(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, {"tie_word_embeddings": False} | KINDS[kind], tmp_path)
    backend(tuple(f"<|{number}|>" for number in range(VOCAB_SIZE - 256))).save(str(tmp_path / "tokenizer.json"))
    reference = load_reference(tmp_path)
    with running_cluster(
        *("--model", str(tmp_path)),
        cluster_decode="2",
        engine_num_blocks="128",
        engine_runner="transformers",
        router_mode="disaggregated",
        router_slo_classes='{"default": {"ttft_ms": 600000, "itl_ms": 600000}}',
    ) as cluster:
        got = [cluster.generate(token_ids=prompt, sampling=sampling(12)) for prompt in prompts()]
        assert {answer.timing.mode for answer in got} == {"disaggregated"}
        for answer, prompt in zip(got, prompts(), strict=True):
            same_up_to_near_ties(answer.token_ids, refer(reference, prompt, 12))
        long = sampling(NUM_TOKENS)
        streams = [
            cluster.inference.Generate(request(token_ids=each, sampling=long), timeout=240) for each in prompts()
        ]
        begun = [[next(stream)] for stream in streams]
        next(iter(decode_workers(cluster).values())).kill()
        answers = [Answer([*first, *stream]) for first, stream in zip(begun, streams, strict=True)]
        assert any(answer.timing.retries for answer in answers)
        for answer, prompt in zip(answers, prompts(), strict=True):
            assert len(answer.token_ids) == NUM_TOKENS
            same_up_to_near_ties(answer.token_ids, refer(reference, prompt, NUM_TOKENS))
