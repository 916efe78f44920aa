"""Where prompts are encoded: short ones at once, long ones in threads in which tenants take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from baton.api import Chat, PromptInput, Text
from baton.chat import ChatMessage
from baton.sampling import SamplingParams
from router.admission import ModelFacts
from router.admission.tenants import Tenant
from router.prompt import PromptEncoder
from router.prompt.sequence import MAX_INLINE_CHARACTERS
from tests.support.waiting import until

FACTS = ModelFacts(id="m", vocab_size=10, max_model_len=2**20, default_sampling=SamplingParams())
SHORT, LONG = Text("short"), Text("x" * (MAX_INLINE_CHARACTERS + 1))
MESSAGE = ChatMessage(role="user", content="a")


class Slow:
    """A tokenizer that takes as long for a long text as it is asked to, and notes where it works."""

    longest_token = 8

    def __init__(self) -> None:
        self.goes_on = threading.Semaphore(0)
        self.num_begun = 0
        self.threads: set[str] = set()

    def encode(self, text: str, **how: Any) -> list[int]:
        self.threads.add(threading.current_thread().name)
        if len(text) > MAX_INLINE_CHARACTERS:
            self.num_begun += 1
            assert self.goes_on.acquire(timeout=30)
        return [1]

    def encode_chat(self, chat: Chat, *, scope: str) -> list[int]:
        return self.encode("")


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


@pytest.mark.parametrize(
    ("prompt", "is_inline"),
    [
        (Chat(messages=(MESSAGE,) * 100), True),
        (Chat(messages=(MESSAGE,) * 300), False),
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
