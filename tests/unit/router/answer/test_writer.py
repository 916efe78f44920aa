"""What a client has been given with k tokens is a function of these tokens: so a broken stream can be continued."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from baton.sampling import FinishReason
from router.answer import AnswerWriter, Piece
from router.prompt import Tokenizer

CAT = "🐈".encode()
MERGES = [(CAT[0], CAT[1]), (0x0A, 0x0A), (0x61, 0x62)]
"""Half a cat, two line ends and `ab` are tokens of their own; whatever else is one token a byte."""
STOPS = ["\n\n", "ab🐈", "🐈🐈", "b\n", "é", "a"]

texts = st.text(st.sampled_from("ab\né🐈👍🏽"), max_size=24)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    letters = _letters()
    merges = [(letters[left], letters[right]) for left, right in MERGES]
    tokens = [*letters, *(left + right for left, right in merges)]
    inner = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    folder = tmp_path_factory.mktemp("bytes")
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return Tokenizer.load(folder)


def _letters() -> list[str]:
    """GPT-2's printable stand-ins for the bytes, in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def grouped(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    return [token_ids[a:b] for a, b in pairwise(edges)]


def written(writer: AnswerWriter, groups: list[list[int]], finish: FinishReason | None) -> Piece:
    """All pieces joined, up to the one that ends the answer; the last group has the engine's word on the end."""
    text, token_ids = "", tuple[int, ...]()
    for number, group in enumerate(groups):
        piece = writer.push(group, finish if number == len(groups) - 1 else None)
        text, token_ids = text + piece.text, token_ids + piece.token_ids
        if piece.finish_reason is not None:
            return Piece(text, token_ids, piece.finish_reason)
    return Piece(text, token_ids, None)


@settings(max_examples=600)
@given(data=st.data())
def test_a_stream_goes_on_byte_for_byte_wherever_it_broke(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token_ids = tokenizer.encode(data.draw(texts))
    junk = st.integers(0, tokenizer.vocab_size - 1)
    token_ids = token_ids[: data.draw(st.integers(0, len(token_ids)))] + data.draw(st.lists(junk, max_size=4))
    token_ids = token_ids or [0]
    stops = data.draw(st.lists(st.sampled_from(STOPS), max_size=3))
    cuts = st.lists(st.integers(0, 30), max_size=8)

    whole = written(AnswerWriter(tokenizer, (), stops), [[i] for i in token_ids], FinishReason.LENGTH)
    num_delivered = data.draw(st.integers(0, len(whole.token_ids)))
    is_ended = num_delivered == len(whole.token_ids)
    before = written(
        AnswerWriter(tokenizer, (), stops),
        grouped(token_ids[:num_delivered], data.draw(cuts)),
        FinishReason.LENGTH if num_delivered == len(token_ids) else None,
    )
    assert (before.finish_reason is not None) == is_ended

    writer = AnswerWriter(tokenizer, (), stops, num_delivered)
    after = written(writer, grouped(token_ids, data.draw(cuts)), FinishReason.LENGTH)
    assert before.token_ids + after.token_ids == whole.token_ids
    assert before.text + after.text == whole.text
    assert after.finish_reason == whole.finish_reason
    assert writer.num_awaited == 0


def test_an_unfinished_character_at_the_end_is_not_given_out_twice(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a🐈")[:2]
    whole = AnswerWriter(tokenizer, (), ()).push(token_ids, FinishReason.LENGTH)
    assert whole.text == "a\ufffd"
    again = AnswerWriter(tokenizer, (), (), num_delivered=2).push(token_ids, FinishReason.LENGTH)
    assert again == Piece("", (), FinishReason.LENGTH)


@pytest.mark.parametrize(("stops", "num_missing"), [((), 2), (("b",), 4)])
def test_an_answer_that_ends_before_what_the_client_has_is_noticed(
    tokenizer: Tokenizer, stops: tuple[str, ...], num_missing: int
) -> None:
    writer = AnswerWriter(tokenizer, (), stops, num_delivered=5)
    piece = writer.push(tokenizer.encode("ba\n"), FinishReason.LENGTH)
    assert piece.finish_reason is not None
    assert piece.token_ids == ()
    assert writer.num_awaited == num_missing
