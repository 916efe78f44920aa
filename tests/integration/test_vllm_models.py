"""Models that vLLM computes and Baton's native step does not, from a prompt to streamed text: `make test-vllm`.

The tokens are compared with those of plain vLLM, which runs in its own environment without anything of Baton's.
The last tests start workers for short sequences, and for log probabilities.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton import wire
from baton.api import GenerateRequest, Text
from baton.cluster import Role
from baton.config import Config, EngineConfig, ModelConfig, RouterConfig, TransferConfig
from baton.v1 import inference_pb2
from engine.engines import make_engine
from tests.chaos.asks import listen
from tests.chaos.fleet import running_fleet
from tests.integration.cluster import is_idle
from tests.support import vllm_models
from tests.support.builders import sequence_spec
from tests.support.vllm import vllm_python
from tests.unit.engine.contract.subjects import Subject

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_TOKENS = 24
TEXT = "The capital of France is Paris, and that of Portugal is Lisbon. " * 6
PLAIN = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
folder, dtype, num_tokens, prompt = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
limits = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 4}
model = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, dtype=dtype, **limits)
params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
print(json.dumps(list(model.generate([tokens_input(prompt)], params)[0].outputs[0].token_ids)))
"""


def plain_answer(folder: Path, dtype: str, prompt: list[int]) -> list[int]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    words = [vllm_python(), "-c", PLAIN, str(folder), dtype, str(NUM_TOKENS), json.dumps(prompt)]
    ran = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=folder)
    answer: list[int] = json.loads(ran.stdout.strip().splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    ("make", "dtype"), [(vllm_models.mla, "float32"), (vllm_models.hybrid, "bfloat16")], ids=["mla", "hybrid"]
)
def test_text_is_streamed_as_plain_vllm_computes_it(make: Callable[[Path], Path], dtype: str, tmp_path: Path) -> None:
    python, folder = vllm_python(), make(tmp_path / "model")
    router = RouterConfig(mode="aggregated", cache_secret="models")
    settings: dict[str, Any] = {
        "runner": "vllm",
        "vllm_python": python,
        "vllm_args": {"enforce_eager": True},
        "kv_cache_gib": 0.25,
    }
    with running_fleet(TransferConfig(), router, model_path=folder, num_blocks=0, lease_s=10.0, **settings) as fleet:
        config = replace(fleet.config, model=replace(fleet.config.model, dtype=dtype))
        fleet.wait_for(fleet.add(Role.DECODE, config=config))
        asked = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        request = GenerateRequest(prompt=Text(TEXT), sampling=asked)
        texts = []
        for _ in range(2):  # the second time with a cached prefix, if the model can reuse one
            parts = [wire.generate_chunk(part) for part in fleet.inference.Generate(wire.generate_request(request))]
            assert sum(bool(part.text) for part in parts) > 3, "it is streamed"
            (choice,) = listen(parts).answer.choices
            texts.append(choice)
        assert texts[0] == texts[1]
        prompt = list(fleet.inference.Tokenize(inference_pb2.TokenizeRequest(text=TEXT)).token_ids)
        fleet.routers[0].wait_for(lambda status: all(map(is_idle, status["workers"])))
    assert list(texts[0].token_ids) == plain_answer(folder, dtype, prompt)
    assert texts[0].text


@pytest.mark.parametrize("limit", [{"max_model_len": 20}, {"num_blocks": 1}], ids=str)
async def test_a_worker_starts_whose_sequences_fit_into_a_block(limit: dict[str, int], tmp_path: Path) -> None:
    """The host computes a prompt at its start, and vLLM takes no prompt of a whole block then."""
    model = ModelConfig(path=str(vllm_models.llama(tmp_path / "model")), revision="tiny")
    few: dict[str, Any] = {"num_blocks": 8, "max_num_seqs": 4, "vllm_args": {"enforce_eager": True}} | limit
    settings = EngineConfig(runner="vllm", vllm_python=vllm_python(), **few)
    engine = make_engine(Config(model=model, engine=settings), tmp_path)
    subject = Subject(engine=engine, expected=lambda prompt, number: [])
    try:
        async with subject.running():
            longest = engine.max_model_len
            tokens, _ = await subject.answer(sequence_spec(range(1, longest - 2), max_tokens=9))
        assert (longest, len(tokens)) == (limit.get("max_model_len", 32), 3)
        assert engine.caches[0].groups, "it exchanges KV"
    finally:
        engine.close()


@pytest.mark.parametrize("compiler", ["", "/no/such/compiler"], ids=["compiled", "without a compiler"])
async def test_the_first_log_probabilities_hold_up_no_other_request(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM compiles a part of them at their first use, which takes as long as hundreds of steps: the start does it.

    If there is no compiler, no request ends the host.
    """
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    model = ModelConfig(path=str(vllm_models.llama(tmp_path / "model")), revision="tiny")
    few: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 4, "vllm_args": {"enforce_eager": True}}
    settings = EngineConfig(runner="vllm", vllm_python=vllm_python(), **few)
    engine = make_engine(Config(model=model, engine=settings), tmp_path)
    subject = Subject(engine=engine, expected=lambda prompt, number: [])

    async def busy_s(first: int, **asked: Any) -> float:
        before_s = engine.load().busy_s
        await subject.answer(sequence_spec(range(first, first + 40), max_tokens=20, **asked))
        return engine.load().busy_s - before_s

    try:
        async with subject.running():
            await busy_s(1)
            plain_s = await busy_s(2)
            scored_s = await busy_s(3, logprobs=2)
            of_prompt_s = await busy_s(4, prompt_logprobs=2)
        print(f"{plain_s:.3f} s without, {scored_s:.3f} s and of the prompt {of_prompt_s:.3f} s with log probabilities")
        assert max(scored_s, of_prompt_s) < 20 * plain_s
    finally:
        engine.close()
