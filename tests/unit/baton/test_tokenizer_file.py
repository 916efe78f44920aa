"""A tokenizer.json that somebody has made to do harm is refused, or ends in an error that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest, ModelLoadError
from baton.tokenizer_file import MAX_TOKEN_CHARACTERS, read_tokenizer
from router.prompt import Tokenizer

PLAIN: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<s>": 2}, "merges": []},
}


def written(folder: Path, **parts: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(PLAIN | parts))
    (folder / "config.json").write_text("{}")
    return folder


WORDS: dict[str, Any] = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 9,
    "vocab": {"a": 0},
}


def added(content: str, number: int = 3) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags}


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def around(num_pieces: int, num_ids: int) -> dict[str, Any]:
    piece = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    token = {"id": "<s>", "ids": [2] * num_ids, "tokens": ["<s>"] * num_ids}
    template = {"single": [piece] * num_pieces + [text], "pair": [text], "special_tokens": {"<s>": token}}
    return {"type": "TemplateProcessing", **template}


HOSTILE: dict[str, dict[str, Any]] = {
    "a long token": {"added_tokens": [added("x" * (MAX_TOKEN_CHARACTERS + 1))]},
    "many long tokens": {"added_tokens": [added(f"{i:04}" + "x" * 1000, 3 + i) for i in range(100)]},
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "x" * 10_000}},
    "growth": {"normalizer": replace("a" * 1000, String="a")},
    "growth of growth": {"normalizer": {"type": "Sequence", "normalizers": [replace("aa", String="a")] * 30}},
    "growth out of nothing": {"normalizer": {"type": "Sequence", "normalizers": [replace("a", Regex="b*")] * 30}},
    "growth of answers": {"decoder": {"type": "Sequence", "decoders": [replace("aa", String="a")] * 30}},
    "many tokens around": {"post_processor": around(10_000, 1)},
    "tokens of many ids": {"post_processor": around(30, 100)},
    "levels": {"normalizer": json.loads('{"type": "Sequence", "normalizers": [' * 200 + "]}" * 200)},
    "no object": {"normalizer": {"type": "Sequence", "normalizers": 5}},
    "ids that nearly all lack a token": {"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**31}, "merges": []}},
    "an added token far away": {"added_tokens": [added("x", 2**30)]},
    "many special tokens": {"added_tokens": [added(f"<{i}>", 3 + i) for i in range(20_000)]},
    "a vocabulary of one enormous id": {"model": {"type": "BPE", "vocab": {"a": 2**32 - 1, "b": -1}, "merges": []}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_do_harm_is_refused_when_it_is_loaded(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        read_tokenizer(written(tmp_path, **HOSTILE[name]))


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [replace("b", String="aa"), replace(" ", Regex=" +")]}},
        {"normalizer": replace("\u2581", String=" "), "decoder": replace(" ", String="\u2581")},
        {"post_processor": around(2, 1)},
        {"added_tokens": [added("<|a|>"), added("<|b|>", 4)]},
    ],
)
def test_what_models_have_is_read(tmp_path: Path, parts: dict[str, Any]) -> None:
    assert read_tokenizer(written(tmp_path, **parts)).get_vocab_size() >= 3


def test_what_is_padded_or_cut_elsewhere_is_not_here(tmp_path: Path) -> None:
    padding: dict[str, Any] = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    tokenizer = read_tokenizer(written(tmp_path, padding=padding, truncation=cut))
    assert tokenizer.encode("ab").ids == [0, 1]


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}},
        {"model": WORDS},
    ],
    ids=["a panic", "an error"],
)
def test_what_the_library_raises_of_a_text_is_an_invalid_request(tmp_path: Path, parts: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(written(tmp_path, **parts))
    for encode in (tokenizer.encode_fragment, tokenizer.encode):
        with pytest.raises(InvalidRequest, match="tokenizer cannot encode the prompt"):
            encode("hello")


def test_what_the_library_raises_of_an_answer_has_a_name(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(written(tmp_path))
    ids: Any = [2**40]
    with pytest.raises(ModelLoadError, match="cannot decode an answer"):
        tokenizer.decode(ids)
