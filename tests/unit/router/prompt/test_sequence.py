"""Where prompts are encoded: short ones at once, long ones in threads in which tenants take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from baton.api import Chat, PromptInput, Text, Truncation, TruncationSide
from baton.chat import ChatMessage
from baton.errors import ContextLengthExceeded, InvalidRequest
from baton.sampling import SamplingParams
from router.admission import ModelFacts
from router.admission.tenants import Tenant
from router.prompt import ChatTemplate, PromptEncoder
from router.prompt.sequence import MAX_INLINE_BYTES
from router.prompt.tokenizer import ChatDraft
from tests.support.waiting import until

FACTS = ModelFacts(id="m", vocab_size=10, max_model_len=2**20, default_sampling=SamplingParams())
SHORT, LONG = Text("short"), Text("x" * (MAX_INLINE_BYTES + 1))
MESSAGE = ChatMessage(role="user", content="a")


class Slow:
    """A tokenizer that takes as long for a long text as it is asked to, and notes where it works."""

    longest_token = 8
    chat_template = ChatTemplate({"default": "{{ messages | length }}{{ documents }}{{ a }}"}, {})

    def __init__(self) -> None:
        self.goes_on = threading.Semaphore(0)
        self.num_begun = 0
        self.threads: set[str] = set()
        self.texts: list[str] = []

    def encode(self, text: str, **how: Any) -> list[int]:
        self.texts.append(text)
        self.threads.add(threading.current_thread().name)
        if len(text) > MAX_INLINE_BYTES:
            self.num_begun += 1
            assert self.goes_on.acquire(timeout=30)
        return [1]

    def draft_chat(self, chat: Chat) -> ChatDraft:
        self.threads.add(threading.current_thread().name)
        return ChatDraft(self.chat_template.question({"messages": [], "tools": None}), None)

    def encode_written(self, text: str, *, mark: str | None, scope: str) -> list[int]:
        return [len(text)]


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def encoder(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> Iterator[PromptEncoder]:
    """An encoder with two threads."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    stand_in: Any = slow
    encoder = PromptEncoder(stand_in)
    yield encoder
    slow.goes_on.release(100)
    encoder.close()


async def test_neither_short_prompts_nor_another_tenants_wait_for_ones_long_ones(
    slow: Slow, encoder: PromptEncoder
) -> None:
    def encode(prompt: PromptInput, tenant: str) -> asyncio.Task[tuple[int, ...]]:
        return asyncio.create_task(encoder.encode(prompt, Tenant(id=tenant), FACTS))

    many = [encode(LONG, "many") for _ in range(5)]
    await until(lambda: slow.num_begun == 1)
    async with asyncio.timeout(20):
        assert await encode(SHORT, "many") == (1,)
    other = encode(LONG, "other")
    await until(lambda: slow.num_begun == 2)
    slow.goes_on.release(6)
    assert await other == (1,)
    assert await asyncio.gather(*many) == [(1,)] * 5


async def test_a_thread_is_taken_until_it_is_done_though_its_client_has_left(
    slow: Slow, encoder: PromptEncoder
) -> None:
    left = asyncio.create_task(encoder.encode(LONG, Tenant(id="a"), FACTS))
    await until(lambda: slow.num_begun == 1)
    left.cancel()
    second = asyncio.create_task(encoder.encode(LONG, Tenant(id="a"), FACTS))
    await asyncio.sleep(0.1)
    assert (slow.num_begun, left.done()) == (1, False)
    slow.goes_on.release(2)
    assert await second == (1,)
    assert left.cancelled()


FEW = ModelFacts(id="m", vocab_size=10, max_model_len=100, default_sampling=SamplingParams())


@pytest.mark.parametrize("side", TruncationSide)
async def test_of_a_text_that_is_cut_no_more_is_encoded_than_could_be_kept(
    slow: Slow, encoder: PromptEncoder, side: TruncationSide
) -> None:
    text = "".join(chr(0x4E00 + i) for i in range(1000))
    await encoder.encode(Text(text), Tenant(id="a"), FEW, Truncation(5, side))
    assert slow.texts == [text[-80:] if side is TruncationSide.LEFT else text[:80]], "5 tokens of 8 characters, twice"
    await encoder.encode(Text(text[:80]), Tenant(id="a"), FEW, Truncation(5, side))
    assert slow.texts[1:] == [text[:80]]


@pytest.mark.parametrize("prompt", [Text("x" * 1700), Chat(messages=(ChatMessage(role="user", content="x" * 1700),))])
async def test_a_prompt_that_is_to_be_cut_may_not_have_any_length(encoder: PromptEncoder, prompt: PromptInput) -> None:
    with pytest.raises(InvalidRequest, match="shorten the prompt"):
        await encoder.encode(prompt, Tenant(id="a"), FEW, Truncation(5))


class Words(Slow):
    """A tokenizer that makes one token of as many characters as it is told."""

    longest_token = 64

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self._num_characters = num_characters

    def encode(self, text: str, **how: Any) -> list[int]:
        self.texts.append(text)
        return [ord(text[at]) % 7 for at in range(0, len(text), self._num_characters)]


MANY = "".join(chr(0x4E00 + i) for i in range(4000))


def encoder_of(words: Words) -> PromptEncoder:
    stand_in: Any = words
    return PromptEncoder(stand_in)


async def test_of_a_text_that_is_far_too_long_a_part_shows_that_it_is() -> None:
    encoder = encoder_of(words := Words(8))
    with pytest.raises(ContextLengthExceeded, match="first 1600 of the prompt's 4000 characters have 200 tokens"):
        await encoder.encode(Text(MANY), Tenant(id="a"), FEW)
    assert words.texts == [MANY[:1600]], "16 characters for each of 100 tokens"
    encoder.close()


async def test_a_long_text_of_long_tokens_is_encoded_whole() -> None:
    encoder = encoder_of(words := Words(50))
    found = await encoder.encode(Text(MANY), Tenant(id="a"), FEW)
    assert (len(found), words.texts) == (80, [MANY[:1600], MANY])
    encoder.close()


@pytest.mark.parametrize("side", TruncationSide)
async def test_of_a_text_that_is_far_too_long_the_kept_side_is_encoded(side: TruncationSide) -> None:
    encoder = encoder_of(words := Words(1))
    found = await encoder.encode(Text(MANY), Tenant(id="a"), FEW, Truncation(50, side))
    kept = MANY[-50:] if side is TruncationSide.LEFT else MANY[:50]
    assert found == tuple(ord(character) % 7 for character in kept)
    assert [len(text) for text in words.texts] == [800], "16 characters for each of 50 tokens"
    encoder.close()


async def test_what_counts_of_a_text_are_its_bytes(slow: Slow, encoder: PromptEncoder) -> None:
    slow.goes_on.release(1)
    await encoder.encode(Text("\U0001f600" * 1100), Tenant(id="a"), FACTS)
    assert slow.threads == {"prompts_0"}


@pytest.mark.parametrize(
    ("prompt", "is_inline"),
    [
        (Chat(messages=(MESSAGE,) * 60), True),
        (Chat(messages=(MESSAGE,) * 80), False),
        (Chat(messages=(MESSAGE,), documents=({"a": 1},)), False),
        (Chat(messages=(MESSAGE,), template_kwargs={"a": 1}), False),
        (SHORT, True),
    ],
)
async def test_what_renders_for_long_is_no_longer_done_at_once(
    slow: Slow, encoder: PromptEncoder, prompt: PromptInput, is_inline: bool
) -> None:
    await encoder.encode(prompt, Tenant(id="a"), FACTS)
    assert slow.threads == {threading.current_thread().name if is_inline else "prompts_0"}
