"""The site has every document, and its links lead where those of the repository do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import site

ROOT = Path(__file__).parents[3]


def test_every_page_is_in_the_navigation_once() -> None:
    nav = list(site.named(site.expanded(site.navigation(), site.pages())))
    assert sorted(nav) == site.pages()


def test_what_the_navigation_names_is_there() -> None:
    assert [entry for entry in site.named(site.navigation()) if "*" not in entry and entry not in site.pages()] == []
    assert [page for page in site.OUTSIDE if not (ROOT / page).exists()] == []


def test_a_pattern_takes_the_pages_that_nothing_else_names() -> None:
    nav = [{"Home": "README.md"}, {"Night": ["night/*"]}, {"None": ["none/*"]}, {"More": ["b.md", "*"]}]
    known = ["README.md", "a.md", "b.md", "night/README.md", "night/a.md", "night/Z.md"]
    assert site.expanded(nav, known) == [
        {"Home": "README.md"},
        {"Night": ["night/README.md", "night/Z.md", "night/a.md"]},
        {"More": ["b.md", "a.md"]},
    ]


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("README.md", "[a](docs/faq.md#b)", "[a](faq.md#b)"),
        ("README.md", "![a `b`](docs/baton.svg)", "![a `b`](baton.svg)"),
        ("gpu.md", "[a](../tests/gpu/README.md#c)", "[a](tests/gpu/README.md#c)"),
        ("decisions/README.md", "[a](../faq.md) [b](#c)", "[a](../faq.md) [b](#c)"),
        ("tests/gpu/README.md", "[a](../../docs/gpu.md)", "[a](../../gpu.md)"),
        ("quickstart/gpu.md", "[a](../../README.md#status)", "[a](../README.md#status)"),
        ("faq.md", "[a](https://b.c/d#e)", "[a](https://b.c/d#e)"),
        ("faq.md", "[a](../baton/errors.py)", "[a](https://host/baton/errors.py)"),
        ("faq.md", "[a](../helm/baton/rules)", "[a](https://host/helm/baton/rules)"),
        ("faq.md", "```\n[a](../baton/errors.py)\n```\n[b](gpu.md)", "```\n[a](../baton/errors.py)\n```\n[b](gpu.md)"),
    ],
)
def test_links_lead_within_the_site_or_into_the_repository(page: str, link: str, expected: str) -> None:
    assert site.for_site(link, page, "https://host") == expected


def test_what_commands_need_is_shown() -> None:
    text = "Install:\n\n<!-- needs: docker -->\n```\ndocker build .\n```\n"
    assert site.for_site(text, "faq.md", "") == "Install:\n\n*Needs docker:*\n\n```\ndocker build .\n```\n"


def test_files_of_a_repository_that_is_published_nowhere_are_named_in_text() -> None:
    assert site.for_site("see [`a.py`](../a.py).", "faq.md", "") == "see `a.py`."
