"""Images of running requests: their number, their sizes, and the memory that all of them take."""

from __future__ import annotations

import contextlib

import pytest

from baton.api import Chat, Text
from baton.chat import ChatMessage
from baton.config import RouterConfig
from baton.errors import InvalidRequest, Overloaded
from router.admission import ImageMemory

MEMORY = RouterConfig(max_images=3, max_image_bytes=100, image_memory_bytes=400)


def chat(*sizes: int) -> Chat:
    parts: tuple[str | bytes, ...] = ("text", *(bytes(size) for size in sizes))
    return Chat(messages=(ChatMessage(role="user", content="text", parts=parts),))


def held(memory: ImageMemory, prompt: Chat, tenant: str = "a") -> tuple[bytes, ...]:
    with memory.holding(prompt, tenant) as images:
        return images


def test_images_are_counted_as_long_as_their_request_runs() -> None:
    memory = ImageMemory(MEMORY)
    with memory.holding(chat(50, 60), "a") as images:
        assert [len(image) for image in images] == [50, 60]
        assert memory.num_held_bytes == 110
        with memory.holding(chat(10), "b"):
            assert memory.num_held_bytes == 120
    assert memory.num_held_bytes == 0
    with contextlib.suppress(ZeroDivisionError), memory.holding(chat(50), "a"):
        raise ZeroDivisionError
    assert memory.num_held_bytes == 0


@pytest.mark.parametrize("prompt", [Text("x"), Chat(messages=(ChatMessage(role="user", content="x"),))])
def test_a_text_holds_nothing(prompt: Text | Chat) -> None:
    memory = ImageMemory(RouterConfig(image_memory_bytes=1))
    with memory.holding(prompt, "a") as images:
        assert (images, memory.num_held_bytes) == ((), 0)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((1, 1, 1, 1), "the request has 4 images; send at most 3"),
        ((101,), "an image has 101 bytes; send images of at most 100 bytes"),
        ((100, 100, 1), "the images have 201 bytes together; send at most 200"),
    ],
)
def test_too_many_or_too_large_images_are_refused(sizes: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as refusal:
        held(ImageMemory(MEMORY), chat(*sizes))
    assert refusal.value.param == "messages"


def test_no_tenant_takes_more_than_half_and_all_no_more_than_there_is() -> None:
    memory = ImageMemory(MEMORY)
    with memory.holding(chat(100), "a"), memory.holding(chat(100), "a"):
        with pytest.raises(Overloaded, match="try again later"):
            held(memory, chat(1), "a")
        with memory.holding(chat(100), "b"), memory.holding(chat(60), "c"):
            with pytest.raises(Overloaded):
                held(memory, chat(41), "d")
            assert held(memory, chat(40), "d")
    assert held(memory, chat(100, 100), "a")
