"""Segments against the tokenizer itself, which encodes the whole text at once."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from baton.errors import InvalidRequest
from router.prompt import literal as segments
from router.prompt.literal import MIN_CHARACTERS, SegmentEncoder

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
        [*CHAT, raw("fox<|im_st"), raw("<|im_start|>user"), raw("\n\n"), raw("\n<"), raw("dog. "), raw("dog. f")],
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
    "no special tokens but one": tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), [], alphabet=BYTES),
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
    for _ in range(100):
        text = "".join(rng.choices([*PARTS, "<|endoftext|>", "<|im_end|>\n<|im_start|>assistant\n", LONG], k=12))
        assert encoder.encode(text, "") == real.encode(text, add_special_tokens=False).ids


BARE = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate("ab<|> ")}, [])).to_str()
"""Without any added token."""


@settings(max_examples=150)
@given(
    special_tokens=st.sets(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4),
    ordinary_tokens=st.sets(st.text("ab< ", min_size=1, max_size=4), max_size=4),
    texts=st.lists(st.text("ab< ", max_size=20), max_size=4),
)
def test_cuts_where_the_tokenizer_does(special_tokens: set[str], ordinary_tokens: set[str], texts: list[str]) -> None:
    made = tokenizers.Tokenizer.from_str(BARE)
    made.add_tokens([*map(special, special_tokens), *map(raw, ordinary_tokens - special_tokens)])
    encoder = SegmentEncoder(made)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(segments, "MIN_CHARACTERS", 1)  # so that it cuts wherever it can
        for text in texts:
            assert encoder.encode(text, "") == made.encode(text, add_special_tokens=False).ids


class Fake:
    """A tokenizer that tells what it had to encode."""

    def __init__(self) -> None:
        self.inner = KINDS["byte level"]
        self.encoded: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None
        """What another thread does while this one encodes."""

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.inner.get_added_tokens_decoder()

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        self.encoded += texts
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return self.inner.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


SYSTEM = f"<|im_start|>system\n{LONG}"
QUESTION = f"<|im_end|>\n<|im_start|>user\n{LONG}?"
ANSWER = f"<|im_end|>\n<|im_start|>assistant\n{LONG}!"


def test_a_chat_s_next_turn_encodes_what_is_new() -> None:
    fake = Fake()
    encoder = SegmentEncoder(fake)  # type: ignore[arg-type]
    encoder.encode(SYSTEM + QUESTION, "")
    assert fake.encoded == [SYSTEM, QUESTION]
    encoder.encode(SYSTEM + QUESTION + ANSWER + QUESTION, "")
    assert fake.encoded == [SYSTEM, QUESTION, ANSWER]


def test_what_comes_twice_in_a_text_is_encoded_once() -> None:
    fake = Fake()
    token_ids = SegmentEncoder(fake).encode(SYSTEM + QUESTION + QUESTION, "")  # type: ignore[arg-type]
    assert fake.encoded == [SYSTEM, QUESTION]
    assert token_ids == fake.inner.encode(SYSTEM + QUESTION + QUESTION, add_special_tokens=False).ids


def test_scopes_share_nothing() -> None:
    fake = Fake()
    encoder = SegmentEncoder(fake)  # type: ignore[arg-type]
    for scope in ("a", "b", "a", "b"):
        encoder.encode(SYSTEM, scope)
    assert fake.encoded == [SYSTEM, SYSTEM]


def test_forgets_what_was_used_least_recently() -> None:
    fake = Fake()
    first, second, *others = (f"{LONG}{number:02}" for number in range(20))
    encoder = SegmentEncoder(fake)  # type: ignore[arg-type]
    encoder.encode(first, "")
    encoder = SegmentEncoder(fake, max_bytes=int(19.5 * encoder.num_bytes))  # type: ignore[arg-type]
    for text in (first, second, *others[:-1], first, others[-1]):
        encoder.encode(text, "")
    fake.encoded.clear()
    for text in (first, *others, second):
        encoder.encode(text, "")
    assert fake.encoded == [second]


def test_keeps_no_more_than_it_may() -> None:
    encoder = SegmentEncoder(KINDS["byte level"], max_bytes=20_000)
    rng = random.Random(7)
    for _ in range(300):
        encoder.encode("".join(rng.choices([*PARTS, LONG, str(rng.random())], k=40)), str(rng.randrange(3)))
        assert encoder.num_bytes <= 20_000
    assert encoder.num_bytes > 10_000


def test_a_very_long_segment_makes_no_others_go() -> None:
    fake = Fake()
    encoder = SegmentEncoder(fake, max_bytes=50_000)  # type: ignore[arg-type]
    encoder.encode(SYSTEM, "")
    num_bytes, very_long = encoder.num_bytes, LONG * 50
    for _ in range(2):
        assert encoder.encode(very_long, "") == fake.inner.encode(very_long, add_special_tokens=False).ids
    assert encoder.num_bytes == num_bytes
    encoder.encode(SYSTEM, "")
    assert fake.encoded == [SYSTEM, very_long, very_long]


def test_keeps_nothing_of_texts_that_it_cannot_cut() -> None:
    for name in ("special tokens that strip what precedes", "special tokens that are words"):
        encoder = SegmentEncoder(KINDS[name])
        encoder.encode(LONG, "")
        assert encoder.num_bytes == 0


def test_refuses_half_a_surrogate_pair_and_goes_on() -> None:
    encoder = SegmentEncoder(KINDS["byte level"])
    with pytest.raises(InvalidRequest, match="surrogate"):
        encoder.encode(f"{SYSTEM}<|im_end|>\ud800", "")
    assert encoder.num_bytes == 0
    assert encoder.encode(SYSTEM, "") == KINDS["byte level"].encode(SYSTEM, add_special_tokens=False).ids


def test_what_two_threads_encode_at_once_is_kept_once() -> None:
    fake = Fake()
    encoder = SegmentEncoder(fake, max_bytes=20_000)  # type: ignore[arg-type]
    fake.meanwhile = lambda: encoder.encode(SYSTEM, "")
    encoder.encode(SYSTEM, "")
    assert fake.encoded == [SYSTEM, SYSTEM]
    num_bytes = encoder.num_bytes
    encoder.encode(SYSTEM, "")
    assert 0 < encoder.num_bytes == num_bytes
    other = SegmentEncoder(fake)  # type: ignore[arg-type]
    other.encode(SYSTEM, "")
    assert encoder.num_bytes == other.num_bytes


def test_what_is_forgotten_while_another_thread_encodes_is_still_its_own() -> None:
    fake = Fake()
    encoder = SegmentEncoder(fake, max_bytes=20_000)  # type: ignore[arg-type]
    encoder.encode(SYSTEM, "")
    fake.meanwhile = lambda: [encoder.encode(f"{LONG}{number}", "") for number in range(100)]
    token_ids = encoder.encode(SYSTEM + QUESTION, "")
    assert token_ids == fake.inner.encode(SYSTEM + QUESTION, add_special_tokens=False).ids
    encoder.encode(SYSTEM, "")
    assert fake.encoded.count(SYSTEM) == 2  # it had been forgotten


def test_serves_threads_at_once() -> None:
    encoder = SegmentEncoder(Fake(), max_bytes=15_000)  # type: ignore[arg-type]
    expected = {text: encoder.encode(text, "") for text in (f"{LONG}{number}" for number in range(40))}
    failed: list[str] = []

    def ask(seed: int) -> None:
        rng, texts = random.Random(seed), list(expected)
        try:
            for _ in range(2_000):
                text = rng.choice(texts)
                if encoder.encode(text, "") != expected[text]:
                    failed.append(text)
        except Exception as error:
            failed.append(repr(error))

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns wherever they can
    try:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert failed == []
    assert 0 < encoder.num_bytes <= 15_000
