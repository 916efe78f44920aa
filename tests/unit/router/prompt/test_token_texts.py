"""Texts of single tokens are those that the tokenizer gives, and are kept in little memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from router.prompt import Tokenizer
from router.prompt.tokenizer import BLOCK, TokenTexts


def test_every_token_has_its_text(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    for token_id in (*range(2 * BLOCK + 1), *range(0, tokenizer.vocab_size + BLOCK, 97)):
        assert tokenizer.text_of(token_id) == tokenizer.decode_all((token_id,))


def test_tokens_are_decoded_once_with_those_beside_them() -> None:
    asked: list[int] = []

    def decode(sequences: Sequence[Sequence[int]]) -> Sequence[str]:
        asked.extend(token_id for (token_id,) in sequences)
        return [f"<{token_id}>" for (token_id,) in sequences]

    texts = TokenTexts(decode)
    for token_id in (BLOCK, BLOCK + 1, 2 * BLOCK - 1, BLOCK, 0):
        assert texts.of(token_id) == f"<{token_id}>"
    assert asked == [*range(BLOCK, 2 * BLOCK), *range(BLOCK)]


def test_a_vocabulary_takes_few_bytes_a_token() -> None:
    num_tokens = 64 * BLOCK
    texts = TokenTexts(lambda sequences: [f"{token_id:06}" for (token_id,) in sequences])
    tracemalloc.start()
    for token_id in range(num_tokens):
        texts.of(token_id)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 20 * num_tokens, "as strings they would take 55 and more each"
