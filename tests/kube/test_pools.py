"""Pools of different engines on the test cluster, as the chart describes them."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import grpc
import pytest

from baton.v1 import inference_pb2_grpc
from tests.integration.cluster import Answer, request
from tests.integration.test_engine_models import VOCAB_SIZE, Reference, load_reference, refer, save_tiny
from tests.integration.test_pools import NUM_TOKENS, is_same
from tests.kube.release import NEEDS_COMPILER, Release, kube_cluster
from tests.kube.test_workers import names
from tests.support.asking import sampling
from tests.support.model_folders import backend

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    NEEDS_COMPILER,
]
DECODE = "--set=pools.decode.engine"
SETTINGS = (
    "--set=config.model.device=cpu",
    "--set=config.engine.num_blocks=128",
    "--set=config.router.mode=disaggregated",
    "--set=worker.resources.requests.memory=1Gi",
    "--set=pools.prefill.engine.max_num_batched_tokens=64",
    "--set=pools.prefill.engine.max_num_seqs=4",
    f"{DECODE}.tensor_parallel=2",
    f"{DECODE}.kv_dtype=bfloat16",
)


def test_pools_of_different_engines_answer_as_one_and_change_apart(tmp_path: Path) -> None:
    """No worker changes its role, and what one pool gets restarts its workers alone."""
    folder, cache = tmp_path / "tiny", tmp_path / "cache"
    cache.mkdir()
    save_tiny("llama", {"tie_word_embeddings": False, "max_position_embeddings": 1024}, folder)
    backend(tuple(f"<|{number}|>" for number in range(VOCAB_SIZE - 256))).save(str(folder / "tokenizer.json"))
    draw, model = random.Random(59), load_reference(folder)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 16, 17, 70, 150, 260)]
    references = [refer(model, prompt, NUM_TOKENS) for prompt in prompts]
    with kube_cluster(4, tmp_path, cache, f"--set=config.model.id={folder}", *SETTINGS) as release:
        release.install()
        answers_as_one_engine(release, prompts, references)
        a_flip_is_refused(release)
        before = {role: names(release, role) for role in ("prefill", "decode")}
        release.upgrade(f"{DECODE}.max_num_seqs=16")
        release.wait_for_pool("decode", 1)
        assert names(release, "prefill") == before["prefill"]
        assert not set(names(release, "decode")) & set(before["decode"])
        assert "max_num_seqs=16" in release.baton_status()["pools"]["decode"]["engine"]
        answers_as_one_engine(release, prompts, references)


def answers_as_one_engine(release: Release, prompts: list[list[int]], references: list[Reference]) -> None:
    num_same = 0
    with grpc.insecure_channel(release.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for prompt, reference in zip(prompts, references, strict=True):
            answer = Answer(list(stub.Generate(request(token_ids=prompt, sampling=sampling(NUM_TOKENS)), timeout=240)))
            assert answer.timing.mode == "disaggregated"
            num_same += is_same(answer.token_ids, reference)
    print(f"{num_same} of {len(prompts)} answers equal to the last token")
    assert num_same >= len(prompts) - 2, "too many near ties for a test that means something"


def a_flip_is_refused(release: Release) -> None:
    (worker,) = (each["id"] for each in release.baton_status()["workers"] if each["role"] == "prefill")
    with pytest.raises((AssertionError, subprocess.CalledProcessError)) as refused:
        release.baton("role", worker, "decode")
    said = " ".join((str(refused.value) + str(getattr(refused.value, "stderr", ""))).split())
    assert (
        f"{worker} cannot become a decode worker: it keeps its engine, and the pools' engines differ in kv_dtype"
        in said
    )
