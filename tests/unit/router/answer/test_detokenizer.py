from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from router.answer import IncrementalDetokenizer
from router.answer.writer import MAX_PENDING
from router.prompt import Tokenizer

CORPUS = [
    "The capital of France is Paris. It's 2024, isn't it?",
    "人工智能正在改变世界。日本語の文章もあります。",
    "नमस्ते दुनिया, यह एक परीक्षण है।",
    "👩‍👩‍👧‍👦 👍🏽 🇫🇷 ❤️‍🔥 é ñ ȧ̇",
]
STOP_ID = 0

hard_text = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            ["👩‍👩‍👧‍👦", "👍🏽", "🇫🇷", "é", "क्षि", "人工智能", "\ufffd", " ", "\n\n", "The capital", "\U0010ffff"]
        ),
    ),
    max_size=8,
).map("".join)


def load(tokenizer: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM; its merges end inside characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=["<stop>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return load(tokenizer, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Llama 2's kind: spaces are ▁, the first one vanishes, unknown characters become byte tokens."""
    tokens = ["<stop>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdeT", "▁a", "▁T"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "T")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<stop>"])
    return load(tokenizer, tmp_path_factory.mktemp("sentencepiece"))


def stream(tokenizer: Tokenizer, token_ids: list[int], sizes: list[int]) -> list[str]:
    """The text in the order it came, tokens pushed in groups of `sizes` and the rest one by one."""
    detokenizer, texts, begin = IncrementalDetokenizer(tokenizer), [], 0
    for size in [*sizes, *[1] * len(token_ids)]:
        texts.append(detokenizer.push(token_ids[begin : begin + size]))
        begin += size
    assert begin >= len(token_ids)
    texts.append(detokenizer.flush())
    assert not detokenizer.holds_back
    return texts


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a byte: every character of more than one byte is split."""
    by_byte = {BYTE_OF[token]: i for i in range(tokenizer.vocab_size) if len(token := tokenizer.token(i)) == 1}
    return [by_byte[byte] for byte in text.encode()]


def _byte_of() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 stands for itself, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_of()


@given(parts=st.lists(st.tuples(hard_text, st.booleans()), max_size=6), sizes=st.lists(st.integers(0, 5), max_size=20))
def test_text_survives_any_split_into_tokens_and_pushes(
    byte_level: Tokenizer, parts: list[tuple[str, bool]], sizes: list[int]
) -> None:
    token_ids = []
    for text, as_bytes in parts:
        token_ids += byte_ids(byte_level, text) if as_bytes else byte_level.encode(text)
    expected = "".join(text for text, _ in parts)
    texts = stream(byte_level, token_ids, sizes)
    assert "".join(texts) == expected == byte_level.decode(token_ids)


@given(text=hard_text.filter(lambda text: "\ufffd" not in text))
def test_no_broken_character_is_ever_given_out(byte_level: Tokenizer, text: str) -> None:
    out = ""
    for piece in stream(byte_level, byte_ids(byte_level, text), []):
        out += piece
        assert "\ufffd" not in piece
        assert text.startswith(out)


@settings(max_examples=400)
@given(data=st.data())
def test_any_tokens_at_all_give_what_decoding_them_at_once_gives(byte_level: Tokenizer, data: st.DataObject) -> None:
    any_id = st.integers(0, byte_level.vocab_size + 3)
    high_bytes = st.sampled_from([i for i in range(byte_level.vocab_size) if byte_level.decode([i]).endswith("\ufffd")])
    token_ids = data.draw(st.lists(st.one_of(any_id, high_bytes, high_bytes, st.just(STOP_ID)), max_size=60))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=20))
    assert "".join(stream(byte_level, token_ids, sizes)) == byte_level.decode(token_ids)


def test_an_unfinished_character_comes_out_at_the_end_only(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push(byte_ids(byte_level, "ok 👍")[:-1]) == "ok "
    assert detokenizer.holds_back
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_are_broken_for_good_are_neither_withheld_nor_costly(byte_level: Tokenizer) -> None:
    broken = byte_ids(byte_level, "é")[1]  # a continuation byte without its beginning
    detokenizer = IncrementalDetokenizer(byte_level)
    begin = time.thread_time()
    text = detokenizer.push([broken] * 20_000)
    seconds = time.thread_time() - begin
    assert 20_000 - len(text) <= MAX_PENDING
    assert text + detokenizer.flush() == "\ufffd" * 20_000
    assert seconds < 10  # 0.6 s here; decoding everything anew each time takes minutes


def test_special_tokens_and_ids_outside_the_vocabulary_have_no_text(byte_level: Tokenizer) -> None:
    thumb = byte_ids(byte_level, "👍")
    token_ids = [STOP_ID, *thumb[:2], STOP_ID, 10**6, *thumb[2:], STOP_ID]
    assert "".join(stream(byte_level, token_ids, [])) == "👍"


def test_a_run_of_special_tokens_does_not_swallow_the_space_after_it(sentencepiece: Tokenizer) -> None:
    token_ids = sentencepiece.encode("a") + [STOP_ID] * 20 + sentencepiece.encode("Ta")
    assert "".join(stream(sentencepiece, token_ids, [])) == "a Ta"


@given(text=st.lists(st.sampled_from([*"abcdeT ", "👍", "人工", "é", "\n"]), max_size=30).map("".join))
def test_byte_fallback_and_leading_space(sentencepiece: Tokenizer, text: str) -> None:
    token_ids = sentencepiece.encode(text)
    pieces = stream(sentencepiece, token_ids, [])
    assert "".join(pieces) == sentencepiece.decode(token_ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_answer_that_continues_a_prompt_keeps_its_space(sentencepiece: Tokenizer) -> None:
    prompt, answer = sentencepiece.encode("bed"), sentencepiece.encode("Tea a")
    alone, continued = IncrementalDetokenizer(sentencepiece), IncrementalDetokenizer(sentencepiece, context=prompt)
    assert alone.push(answer) + alone.flush() == "Tea a"
    assert continued.push(answer) + continued.flush() == " Tea a"


def test_an_answer_loses_nothing_wherever_its_prompt_ends(byte_level: Tokenizer) -> None:
    """Also inside a character: what the answer has of it is no character, and is told to be none."""
    token_ids = byte_ids(byte_level, "ok 人工 👍") + byte_level.encode("智能 done")
    texts = []
    for half in range(len(token_ids)):
        detokenizer = IncrementalDetokenizer(byte_level, context=token_ids[:half])
        texts.append("".join(detokenizer.push([token_id]) for token_id in token_ids[half:]) + detokenizer.flush())
        assert texts[-1] == byte_level.decode(token_ids[half:])
    assert texts[4:7] == ["\ufffd\ufffd工 👍智能 done", "\ufffd工 👍智能 done", "工 👍智能 done"]


def test_replayed_tokens_give_the_same_text_in_any_grouping(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("人工智能 👩‍👩‍👧‍👦 done") + byte_ids(byte_level, "é")[:1]
    for half in range(len(token_ids)):
        one_by_one, replayed = IncrementalDetokenizer(byte_level), IncrementalDetokenizer(byte_level)
        before = "".join([one_by_one.push([token_id]) for token_id in token_ids[:half]])
        assert replayed.push(token_ids[:half]) == before
        assert replayed.push(token_ids[half:]) == "".join([one_by_one.push([i]) for i in token_ids[half:]])
        assert replayed.flush() == one_by_one.flush() == "\ufffd"
