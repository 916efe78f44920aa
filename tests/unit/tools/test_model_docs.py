"""The table of models is what the models answer."""

from __future__ import annotations

import pytest

from tools import model_docs


def rows() -> dict[str, str]:
    """The rows of the page by type."""
    lines = model_docs.PAGE.read_text(encoding="utf-8").splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def test_the_page_has_the_types_that_are_tested() -> None:
    assert sorted(rows()) == model_docs.types()


def test_the_families_of_the_page_are_what_their_types_answer() -> None:
    assert model_docs.families() in model_docs.PAGE.read_text(encoding="utf-8")
    assert {kind for kinds in model_docs.OF_FIELD.values() for kind in kinds} <= set(model_docs.types())


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("deepseek_v3", "gemma4_text", "llama") else pytest.param(kind, marks=pytest.mark.full)
        for kind in model_docs.types()
    ],
)
def test_a_row_is_what_the_model_answers(kind: str) -> None:
    assert rows()[kind] == model_docs.row(kind)
