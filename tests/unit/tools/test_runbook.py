"""Each alert leads to a page about it, and what the pages and the alerts name is there."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from baton.config import Config
from tests.observability.shipped import RULES, alerts
from tools.dashboards.__main__ import ROOT

FOLDER = ROOT / "docs/runbook"
PAGES = {path.stem: path.read_text() for path in FOLDER.glob("*.md") if path.stem != "README"}
INDEX = (FOLDER / "README.md").read_text()
ADDRESS = "https://baton.example/docs/runbook/{}.md"
"""The address of a page in the rules as they are committed; the chart puts the user's in its place."""
NAMES = [rule["alert"] for rule in alerts()]


def test_every_runbook_url_leads_to_a_page_and_every_page_belongs_to_an_alert() -> None:
    assert len(NAMES) == len(set(NAMES)) > 30
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == ADDRESS.format(rule["alert"])
    assert PAGES.keys() == set(NAMES)


def test_the_index_has_every_alert_in_its_group_with_its_severity() -> None:
    _, _, tables = INDEX.partition("\n## Alerts\n")
    groups = [re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \|", text, re.MULTILINE) for text in tables.split("###")]
    expected = [
        [(rule["alert"], rule["alert"], rule["labels"]["severity"]) for rule in group["rules"]]
        for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    ]
    assert groups[1:] == expected


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_a_page_has_symptom_commands_and_fix(rule: dict[str, Any]) -> None:
    after = f"after {rule['for']}" if "for" in rule else "at once"
    title, begun, rest = PAGES[rule["alert"]].split("\n\n", 2)
    assert title == f"# {rule['alert']}"
    assert begun == f"*{rule['labels']['severity']}, {after}*"
    found = re.fullmatch(r"## Symptom\n\n(.+)\n## Commands\n\n(.+)\n## Fix\n\n(.+)", rest, re.DOTALL)
    assert found
    symptom, commands, fix = found.groups()
    assert len(symptom.split()) > 10
    (block,) = re.findall(r"```sh\n(.*?)```", commands, re.DOTALL)
    assert all(re.fullmatch(r"\S.*\S +# \S.*", line) for line in block.splitlines()), "what each is for"
    rows = [line for line in fix.splitlines() if line.startswith("| ")]
    assert rows[0] == "| What you see | What it means | What to do |"
    assert len(rows) > 2
    # A cell may be code with bars: none has any, so that three cells are three.
    assert {row.count("|") for row in rows} == {4}


def named() -> Iterator[tuple[str, str]]:
    """Settings and values on the pages, where they are in backquotes, and in the alerts, and where each stands."""
    for where, text in {**PAGES, "README": INDEX}.items():
        yield from ((where, name) for code in re.findall(r"`([^`\n]+)`", text) for name in DOTTED.findall(code))
    for rule in alerts():
        for text in (rule["annotations"][kind] for kind in ("description", "runbook")):
            yield from ((f"alert {rule['alert']}", name) for name in DOTTED.findall(text))


@cache
def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "helm/baton/values.schema.json").read_text())
    return found


def is_value(parts: list[str], at: dict[str, Any]) -> bool:
    """Whether the chart has a value of that path."""
    if name := at.get("$ref", "").removeprefix("#/definitions/"):
        return is_value(parts, schema()["definitions"][name])
    if not parts:
        return True
    here = at.get("properties", {})
    if parts[0] in here:
        return is_value(parts[1:], here[parts[0]])
    return any(is_value(parts, one) for one in at.get("allOf", ())) or ("properties" not in at and "allOf" not in at)


SETTINGS = {
    f"{section.name}.{field.name}"
    for section in dataclasses.fields(Config)
    for field in dataclasses.fields(section.default_factory)  # type: ignore[arg-type]
}
DOTTED = re.compile(r"(?<![\w./-])([a-z]\w*(?:\.[a-zA-Z]\w*)+)(?![\w/(])")
NOT_OURS = {"tls.crt", "tls.key"}


def test_settings_and_values_that_are_named_are_there() -> None:
    found = {(where, name) for where, name in named() if name not in NOT_OURS}
    wrong = [(where, name) for where, name in found if name not in SETTINGS and not is_value(name.split("."), schema())]
    assert wrong == []
    assert len(found) > 60
    assert not is_value(["router", "replica"], schema())
    assert is_value(["router", "resources", "limits", "cpu"], schema())


def test_annotations_are_sentences() -> None:
    """Also for those who hear them read aloud, at night: no keywords before a colon, no fragments."""
    for rule in alerts():
        notes = rule["annotations"]
        assert re.match(r"[A-Z{]", notes["summary"]), rule["alert"]
        assert not notes["summary"].endswith("."), "it is a headline"
        for name in ("description", "runbook"):
            assert notes[name].endswith("."), (rule["alert"], name)
            for sentence in re.split(r"(?<=\.) ", notes[name]):
                assert re.match(r"[A-Z`]", sentence), (rule["alert"], sentence)
                assert len(sentence.split()) >= 3, (rule["alert"], sentence)
