"""Texts of sampling parameters become the tokens that workers look for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from baton.errors import InvalidRequest
from baton.sampling import DRY_BREAKERS, MAX_BAD_WORD_TOKENS, SamplingParams
from router.prompt import Tokenizer, in_tokens


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def test_a_bad_word_is_one_at_the_beginning_and_behind_a_space(tokenizer: Tokenizer) -> None:
    alone, behind = tokenizer.encode_fragment("Paris"), tokenizer.encode_fragment(" Paris")
    assert alone != behind
    for word in ("Paris", " Paris"):
        params = in_tokens(SamplingParams(bad_words=(word,), bad_word_ids=((7, 8),)), tokenizer)
        assert params.bad_word_ids == ((7, 8), tuple(alone), tuple(behind))
        assert params.bad_words == ()
    assert tokenizer.decode(tokenizer.encode("in Paris")[-1:]) == " Paris", "as it stands in an answer"


def test_a_bad_word_of_white_space_is_that(tokenizer: Tokenizer) -> None:
    for word in ("\n", " ", "\n\n"):
        params = in_tokens(SamplingParams(bad_words=(word,)), tokenizer)
        assert params.bad_word_ids == (tuple(tokenizer.encode_fragment(word)),)


def test_a_bad_word_of_too_many_tokens_is_refused(tokenizer: Tokenizer) -> None:
    cats = "🐈" * 60
    assert len(tokenizer.encode_fragment(cats)) > MAX_BAD_WORD_TOKENS
    with pytest.raises(InvalidRequest, match=r"sampling\.bad_words must be texts of at most 64 tokens") as refusal:
        in_tokens(SamplingParams(bad_words=(cats,)), tokenizer)
    assert refusal.value.param == "bad_words"


def test_breakers_are_the_tokens_that_they_end_with(tokenizer: Tokenizer) -> None:
    params = SamplingParams(dry_multiplier=0.8, dry_sequence_breakers=("\n", ":", "xyz\n"), dry_breaker_ids=(4,))
    found = in_tokens(params, tokenizer)
    line, colon = tokenizer.encode_fragment("a\n")[-1], tokenizer.encode_fragment("a:")[-1]
    assert found.dry_breaker_ids == (4, line, colon)
    assert found.dry_sequence_breakers == DRY_BREAKERS
    assert len(in_tokens(SamplingParams(dry_multiplier=0.8), tokenizer).dry_breaker_ids) == len(DRY_BREAKERS)
    behind_text = in_tokens(dataclasses.replace(params, dry_sequence_breakers=("bc",)), tokenizer)
    assert tokenizer.encode_fragment("abc")[-1] != tokenizer.encode_fragment("bc")[-1]
    assert behind_text.dry_breaker_ids == (4, tokenizer.encode_fragment("abc")[-1])


def test_a_line_break_is_saved_from_xtc_unless_the_client_names_others(tokenizer: Tokenizer) -> None:
    line = tuple(tokenizer.encode_fragment("\n"))
    assert in_tokens(SamplingParams(xtc_probability=0.5), tokenizer).xtc_exempt_token_ids == line
    asked = SamplingParams(xtc_probability=0.5, xtc_exempt_token_ids=(9,))
    assert in_tokens(asked, tokenizer) == asked


def test_a_plain_request_stays_as_it_is(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=("x",), stop_token_ids=(4,))
    assert in_tokens(params, tokenizer) is params


@pytest.mark.parametrize("text", ["Paris, 日本の首都は 😀 \n\t é", "<|im_end|> a", "\x00\x7f\xad"])
def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_fragment(text))) == text.encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_the_bytes_of_tokens_that_are_spelled_in_another_way(tmp_path: Path) -> None:
    """Llama 2's: a space is U+2581, and rare bytes are tokens of their own."""
    vocabulary = {"<unk>": 0, "\u2581Paris": 1, "<0xF0>": 2, "é": 3}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token_bytes(token_id) for token_id in (1, 2, 3)] == [b" Paris", b"\xf0", "é".encode()]
