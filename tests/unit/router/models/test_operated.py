"""Which model an operator's request means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster import Worker
from baton.errors import InvalidRequest, ModelNotFound
from router.models.operated import OperatedModels
from tests.support.builders import model_announcement, worker


def entry(release: str, *workers: Worker, name: str = "llama") -> Any:
    announced = model_announcement(f"id-of-{release}", name=name, release=release)
    return SimpleNamespace(announcement=announced, pools=SimpleNamespace(workers=workers))


OLD, NEW, QWEN = (
    entry("llama-1", worker("a"), worker("both")),
    entry("llama-2", worker("both")),
    entry("q", name="qwen"),
)
MODELS = OperatedModels(lambda: (OLD, NEW, QWEN))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("", [OLD, NEW, QWEN]),
        ("llama", [OLD, NEW]),
        ("llama-2", [NEW]),
        ("id-of-llama-1", [OLD]),
        ("qwen", [QWEN]),
    ],
)
def test_a_model_is_named_by_name_release_or_content(name: str, found: list[Any]) -> None:
    assert list(MODELS.named(name)) == found


def test_a_name_that_is_unknown_is_refused_with_the_known_ones() -> None:
    for call in (MODELS.named, MODELS.one):
        with pytest.raises(ModelNotFound, match="llama-1, llama-2, q"):
            call("lama")
    with pytest.raises(ModelNotFound, match="there are none"):
        OperatedModels(tuple).named("llama")
    with pytest.raises(ModelNotFound, match="no model is served"):
        OperatedModels(tuple).one("")


def test_one_of_several_has_to_be_named() -> None:
    assert MODELS.one("qwen") is QWEN
    assert OperatedModels(lambda: (NEW,)).one("") is NEW
    for name in ("", "llama"):
        with pytest.raises(InvalidRequest, match="there are several models: llama-1, llama-2") as caught:
            MODELS.one(name)
        assert caught.value.param == "model"
