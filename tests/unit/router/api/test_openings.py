"""What identifies the session of a request."""

from __future__ import annotations

from typing import Any

from router.api.sessions import MOST_CHARACTERS, opening_of

SYSTEM = {"role": "system", "content": "Be brief."}


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def user(text: str, url: str = "") -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if url:
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": parts}


def test_a_session_stays_the_same_while_its_conversation_grows() -> None:
    first = chat(SYSTEM, user("hello"))
    later = chat(SYSTEM, user("hello"), {"role": "assistant", "content": "hi"}, user("and now?"))
    assert opening_of(first) == opening_of(later)
    assert opening_of(first) != opening_of(chat(SYSTEM, user("good evening")))


def test_images_and_long_texts_are_not_copied() -> None:
    """It is computed on the event loop: writing out an image of many MB would stop all other requests."""
    image = "data:image/png;base64," + "A" * 2**20
    assert len(opening_of(chat(SYSTEM, user("hello", image)))) < 100
    assert opening_of(chat(user("hello", image))) == opening_of(chat(user("hello")))
    contents: tuple[Any, ...] = ("x" * 2**20, [{"type": "text", "text": "x" * 2**20}])
    for content in contents:
        assert len(opening_of(chat({"role": "user", "content": content}))) < MOST_CHARACTERS + 10


def test_a_body_without_texts_has_an_opening() -> None:
    contents: tuple[Any, ...] = (None, 5, {}, [], [5], [{"text": 5}])
    for content in contents:
        assert opening_of(chat({"role": "user", "content": content})) == "\0user:"
