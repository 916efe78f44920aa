"""The documents name what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvstore.transfer.protocol import receive_state, send_state
from tools import site

ROOT = Path(__file__).parents[2]
PAGES = sorted(Path(site.source_of(page)) for page in site.pages())
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]+)?\)")
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
FOLDERS = (
    "baton engine router kvstore worker lab deploy prefill_worker decode_worker tests tools docs examples proto helm"
)
OURS = tuple(f"{folder}/" for folder in FOLDERS.split())


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_and_every_path_leads_somewhere(page: Path) -> None:
    text = (ROOT / page).read_text()
    links = [(ROOT / page).parent / link for link, _ in LINK.findall(text)]
    paths = [ROOT / path for path in PATH.findall(text) if path.startswith(OURS)]
    assert [str(target) for target in (*links, *paths) if not target.exists()] == []


def test_anchors_within_the_documents_exist() -> None:
    num_checked = 0
    for page in PAGES:
        for link, anchor in LINK.findall((ROOT / page).read_text()):
            if anchor and (not link or link.endswith(".md")):
                num_checked += 1
                text = ((ROOT / page).parent / link if link else ROOT / page).read_text()
                headings = re.findall(r"^#+ (.*)$", site.FENCE.sub("", text), re.MULTILINE)
                slugs = {"#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in slugs, f"{page}: {link}{anchor}"
    assert num_checked > 50


def test_private_words_are_few() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert rows == sorted(rows, key=str.lower)
    assert 15 <= len(rows) <= 25


@pytest.mark.parametrize(
    ("machine", "legal"), [("receive_state", receive_state.LEGAL), ("send_state", send_state.LEGAL)]
)
def test_the_state_machines_of_a_transfer_are_drawn_as_they_are(machine: str, legal: dict[Any, Any]) -> None:
    _, _, behind = (ROOT / "docs/transfer.md").read_text().partition(f"protocol/{machine}.py`):")
    drawn = set(re.findall(r"^    ([A-Z]+) --> ([A-Z]+)", behind.split("```")[1], re.MULTILINE))
    assert drawn == {(before.name, after.name) for before, states in legal.items() for after in states}
