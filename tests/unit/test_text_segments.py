"""Segments against the tokenizer itself, which encodes the whole text at once."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from router.text.segments import MIN_CHARACTERS, SegmentEncoder

CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "<|im_start|>user\n[INST] x <s> </s> <unk>\n\n",
    "été 人工智能 👍🏽",
]
LONG = "The lazy dog jumps over the quick brown fox, and so does the other dog. "
assert len(LONG) > MIN_CHARACTERS
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "<s><s>", "[INST]"]


def special(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, special=True, normalized=False, **flags)


def raw(content: str) -> AddedToken:
    return AddedToken(content, special=False, normalized=False)


def tokenizer(
    pre_tokenizer: Any, tokens: list[AddedToken], normalizer: Any = None, alphabet: list[str] | None = None
) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    made.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet or [], show_progress=False
        ),
    )
    made.add_tokens(tokens)
    return made


BYTES = pre_tokenizers.ByteLevel.alphabet()
CHAT = [special(token) for token in SPECIAL]
KINDS = {
    "byte level": tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), CHAT, alphabet=BYTES),
    "a space before each part": tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True), CHAT, alphabet=BYTES),
    "a space before the first part": tokenizer(pre_tokenizers.Metaspace(prepend_scheme="first"), CHAT),
    "a normalizer that prepends": tokenizer(
        None, CHAT, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "tokens that take the place of special ones": tokenizer(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        [*CHAT, raw("fox<|im_st"), raw("<|im_start|>user"), raw("\n\n"), raw("dog. ")],
        alphabet=BYTES,
    ),
    "special tokens that are normalized": tokenizer(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        [*CHAT, AddedToken("<TOOL>", special=True, normalized=True)],
        normalizers.Sequence([normalizers.Prepend("_"), normalizers.Lowercase()]),
        BYTES,
    ),
    "special tokens that strip what follows": tokenizer(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        [special(token, rstrip=True) for token in SPECIAL],
        alphabet=BYTES,
    ),
    "special tokens that strip what precedes": tokenizer(
        pre_tokenizers.ByteLevel(add_prefix_space=False), [*CHAT, special("<mask>", lstrip=True)], alphabet=BYTES
    ),
    "special tokens that are words": tokenizer(
        pre_tokenizers.ByteLevel(add_prefix_space=False), [*CHAT, special("fox", single_word=True)], alphabet=BYTES
    ),
    "no special tokens": tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), [], alphabet=BYTES),
}
PARTS = [
    *SPECIAL,
    "<|im_st",
    "art|>",
    "user",
    "fox",
    "<mask>",
    "<TOOL>",
    "<tool>",
    "dog. ",
    " ",
    "\n\n",
    "été 人",
    "👍🏽",
    LONG,
]
TEXTS = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=6)), max_size=12).map("".join)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return KINDS[request.param]


@given(texts=st.lists(TEXTS, max_size=4))
@pytest.mark.parametrize("name", KINDS)
def test_encodes_as_the_tokenizer_does_first_and_again(name: str, texts: list[str]) -> None:
    encoder = SegmentEncoder(KINDS[name])
    for text in [*texts, *texts, "".join(texts)]:
        assert encoder.encode(text, "") == KINDS[name].encode(text, add_special_tokens=False).ids


def test_encodes_long_chats_as_the_tokenizer_does(kind: tokenizers.Tokenizer) -> None:
    rng, encoder = random.Random(5), SegmentEncoder(kind)
    for _ in range(30):
        text = ""
        for _ in range(6):
            text += "".join(rng.choices([*PARTS, LONG, LONG], k=8))
            assert encoder.encode(text, "") == kind.encode(text, add_special_tokens=False).ids


def test_encodes_as_the_real_model_s_tokenizer_does(model_dir: Path) -> None:
    real = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    rng, encoder = random.Random(6), SegmentEncoder(real)
    for _ in range(200):
        text = "".join(rng.choices([*PARTS, "<|endoftext|>", "<|im_end|>\n<|im_start|>assistant\n", LONG], k=12))
        assert encoder.encode(text, "") == real.encode(text, add_special_tokens=False).ids


class Counting:
    """A tokenizer that tells what it had to encode."""

    def __init__(self) -> None:
        self.inner = KINDS["byte level"]
        self.encoded: list[str] = []

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.inner.get_added_tokens_decoder()

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        self.encoded += texts
        return self.inner.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


SYSTEM = f"<|im_start|>system\n{LONG}"
QUESTION = f"<|im_end|>\n<|im_start|>user\n{LONG}?"
ANSWER = f"<|im_end|>\n<|im_start|>assistant\n{LONG}!"


def test_a_chat_s_next_turn_encodes_what_is_new() -> None:
    counting = Counting()
    encoder = SegmentEncoder(counting)  # type: ignore[arg-type]
    encoder.encode(SYSTEM + QUESTION, "")
    assert counting.encoded == [SYSTEM, QUESTION]
    encoder.encode(SYSTEM + QUESTION + ANSWER + QUESTION, "")
    assert counting.encoded == [SYSTEM, QUESTION, ANSWER]


def test_what_comes_twice_in_a_text_is_encoded_once() -> None:
    counting = Counting()
    token_ids = SegmentEncoder(counting).encode(SYSTEM + QUESTION + QUESTION, "")  # type: ignore[arg-type]
    assert counting.encoded == [SYSTEM, QUESTION]
    assert token_ids == counting.inner.encode(SYSTEM + QUESTION + QUESTION, add_special_tokens=False).ids


def test_scopes_share_nothing() -> None:
    counting = Counting()
    encoder = SegmentEncoder(counting)  # type: ignore[arg-type]
    for scope in ("a", "b", "a", "b"):
        encoder.encode(SYSTEM, scope)
    assert counting.encoded == [SYSTEM, SYSTEM]


def test_forgets_what_was_used_least_recently() -> None:
    counting = Counting()
    first, second, third = (f"{LONG}{i}" for i in range(3))
    encoder = SegmentEncoder(counting)  # type: ignore[arg-type]
    encoder.encode(first, "")
    encoder = SegmentEncoder(counting, max_bytes=int(2.5 * encoder.num_bytes))  # type: ignore[arg-type]
    for text in (first, second, first, third):
        encoder.encode(text, "")
    counting.encoded.clear()
    for text in (first, third, second):
        encoder.encode(text, "")
    assert counting.encoded == [second]


def test_keeps_no_more_than_it_may() -> None:
    encoder = SegmentEncoder(KINDS["byte level"], max_bytes=20_000)
    rng = random.Random(7)
    for _ in range(300):
        encoder.encode("".join(rng.choices([*PARTS, LONG, str(rng.random())], k=40)), str(rng.randrange(3)))
        assert encoder.num_bytes <= 20_000
    assert encoder.num_bytes > 10_000
    encoder.encode(LONG * 1_000, "")  # more than there is room for
    assert encoder.num_bytes == 0


def test_refuses_half_a_surrogate_pair_and_goes_on() -> None:
    encoder = SegmentEncoder(KINDS["byte level"])
    with pytest.raises(TypeError):
        encoder.encode(f"{SYSTEM}<|im_end|>\ud800", "")
    assert encoder.encode(SYSTEM, "") == KINDS["byte level"].encode(SYSTEM, add_special_tokens=False).ids


def test_serves_threads_at_once() -> None:
    reference = KINDS["byte level"]
    encoder = SegmentEncoder(reference, max_bytes=3_000)  # so that they evict each other's
    wrong: list[str] = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            text = "".join(rng.choices([SYSTEM, QUESTION, ANSWER, LONG, *SPECIAL], k=6))
            if encoder.encode(text, "") != reference.encode(text, add_special_tokens=False).ids:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 0 < encoder.num_bytes <= 3_000
    encoder.encode(LONG * 1_000, "")  # makes all others go
    assert encoder.num_bytes == 0
