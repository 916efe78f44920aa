"""Tests that need vLLM are in `make test-vllm` alone."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.vllm.versions import SUPPORTED
from tests.conftest import pytest_collection_modifyitems
from tests.support.vllm import GIVEN, KEPT, is_left_out, keep_vllm_python, vllm_python

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
SELECTIONS = [quoted or word for quoted, word in re.findall(r"-m (?:'([^']+)'|(fast|hypothesis|vllm)\b)", MAKEFILE)]


def test_no_other_stage_runs_them() -> None:
    assert {"fast", "vllm", "hypothesis and fast", "full and not chaos", "chaos or slow"} <= set(SELECTIONS)
    for marks in ({"vllm"}, {"vllm", "slow"}, {"vllm", "clock"}, {"vllm", "integration", "full"}):
        assert [each for each in SELECTIONS if not is_left_out(marks, each)] == ["vllm"]
        assert not is_left_out(marks, ""), "a run without a selection says what they need"
    assert not is_left_out({"slow"}, "slow")


@pytest.mark.parametrize(("selection", "number"), [("", 2), ("vllm", 2), ("not chaos", 1)])
def test_they_are_left_out_when_tests_are_collected(selection: str, number: int) -> None:
    def item(*marks: str) -> Any:
        own = [SimpleNamespace(name=name) for name in marks]
        path = ROOT / "tests" / "unit" / "test_x.py"
        add = lambda name: own.append(SimpleNamespace(name=name))  # noqa: E731
        closest = lambda name: next((mark for mark in own if mark.name == name), None)  # noqa: E731
        return SimpleNamespace(
            path=path, nodeid="x::y", iter_markers=lambda: own, add_marker=add, get_closest_marker=closest
        )

    left_out: list[Any] = []

    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=selection), hook=hook)
    items = [item("vllm"), item()]
    pytest_collection_modifyitems(config, items)
    assert (len(items), len(left_out)) == (number, 2 - number)
    marks = [{mark.name for mark in each.iter_markers()} for each in items]
    assert marks[-1] == {"fast"}
    assert {"vllm", "fast"} not in marks


def test_without_an_interpreter_a_test_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEPT, raising=False)
    with pytest.raises(pytest.skip.Exception, match="run `make test-vllm`"):
        vllm_python()
    monkeypatch.setenv(KEPT, "/opt/vllm/bin/python")
    assert vllm_python() == "/opt/vllm/bin/python"


def test_processes_of_baton_do_not_see_a_variable_that_is_no_setting() -> None:
    assert GIVEN not in os.environ
    environ = {GIVEN: "/opt/vllm/bin/python"}
    keep_vllm_python(environ)
    assert environ == {KEPT: "/opt/vllm/bin/python"}
    keep_vllm_python(environ)
    assert environ == {KEPT: "/opt/vllm/bin/python"}, "a process of xdist inherits it"


def test_the_stage_installs_a_version_that_is_supported_and_nothing_else_does() -> None:
    (version,) = re.findall(r"^VLLM_VERSION := (\S+)$", MAKEFILE, re.MULTILINE)
    assert version.rpartition(".")[0] in SUPPORTED
    assert f"{GIVEN}=$(abspath $(VLLM))/bin/python $(PYTEST) -m vllm tests\n" in MAKEFILE
    needing = re.findall(r"^([\w$()/.-]+):.*\$\(VLLM\)/\.installed", MAKEFILE, re.MULTILINE)
    assert needing == ["test-vllm"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    assert not [each for each in listed if each.startswith("vllm")]
