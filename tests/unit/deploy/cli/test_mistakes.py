"""Commands that were typed wrongly get one sentence."""

from __future__ import annotations

import pytest

from baton.errors import InvalidRequest
from deploy.cli.app import app
from deploy.cli.mistakes import WRONG_USE, run


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("upp", "No such command 'upp'. Did you mean 'up'?"),
        ("xyz", "No such command 'xyz'; see `baton --help`"),
        ("up --prefil 2", "No such option: --prefil; did you mean --prefill?"),
        ("scale decode -1", "-1 is not allowed: numbers must be 0 or more; see `baton scale --help`"),
        ("scale decode", "Missing argument 'N'; see `baton scale --help`"),
        ("generate", "Missing argument 'text'; see `baton generate --help`"),
    ],
)
def test_words_that_are_not_understood(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, words.split()) == WRONG_USE
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_without_words_there_is_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, []) == 0
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "sentence"),
    [("worker", "Ray starts the workers, on any node"), ("ruoter", "did you mean router"), ("x", "mean model, router")],
)
def test_what_is_no_part_of_a_cluster(part: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        run(app, ["run", part])
