"""The default model as converted: transformers takes the folder, and it says what the model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.api import Chat
from baton.chat import ChatMessage
from baton.config import ModelConfig
from deploy.models import CATALOGUE, ignore_progress, resolve
from deploy.models.wheel import catalogue_folder
from router.prompt import Tokenizer
from tests.support.chats import encoded

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, trust_remote_code=False).eval()


def greedy(model: Any, token_ids: list[int], max_new_tokens: int) -> list[int]:
    import torch

    out = model.generate(torch.tensor([token_ids]), do_sample=False, max_new_tokens=max_new_tokens)
    answer: list[int] = out[0, len(token_ids) :].tolist()
    return answer


def test_it_knows_the_capital_of_france(model: Any, model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    answer = greedy(model, tokenizer.encode("The capital of France is"), 8)
    assert tokenizer.decode(answer).startswith(" Paris")


def test_it_answers_a_chat_and_ends_its_turn(model: Any, model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    prompt = encoded(tokenizer, Chat(messages=(ChatMessage(role="user", content="What is 2 + 2? Answer briefly."),)))
    answer = greedy(model, prompt, 64)
    assert "4" in tokenizer.decode(answer)
    assert answer[-1] in tokenizer.eos_ids


def test_weights_are_complete_and_float32(model: Any, model_dir: Path) -> None:
    import torch

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.config.rope_parameters["rope_theta"] == 100_000
    generation = json.loads((model_dir / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "temperature": 0.2, "top_p": 0.9}


def test_text_under_the_models_own_prediction(model: Any, model_dir: Path) -> None:
    """The finest of these tests: without undoing the permutation of q and k the model still says "Paris".

    Measured: 2.642 as it is, 3.653 with both left permuted, 10.2 with q only, 9.6 with k only.
    """
    import torch

    text = "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius at sea level."
    token_ids = torch.tensor([Tokenizer.load(model_dir).encode(text)])
    with torch.inference_mode():
        loss = float(model(token_ids, labels=token_ids).loss)
    assert loss == pytest.approx(2.642, abs=0.01)


@pytest.mark.chaos
def test_conversion_from_scratch_writes_the_same_files(model_dir: Path, tmp_path: Path) -> None:
    folder = catalogue_folder(CATALOGUE["smollm2-135m-instruct"], tmp_path, ignore_progress)
    assert folder.name == model_dir.name
    names = sorted(path.name for path in model_dir.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        assert (folder / name).read_bytes() == (model_dir / name).read_bytes(), name
    assert resolve(ModelConfig(), tmp_path).path == folder
