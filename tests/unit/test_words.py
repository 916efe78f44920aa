"""What is read is in plain technical English: messages, docstrings, comments, pages, the chart and its dashboards."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from typing import Any

import yaml

from tests.unit.test_docs import PAGES
from tests.unit.test_house import FRAGMENT, ROOT, docstrings_of, nodes_of, product_files, tree_of

AVOIDED = re.compile(r"\b(told|tells|whoever|so long as)\b", re.IGNORECASE)
"""A program reports or shows, a worker is called one, and a state lasts until or while."""
CHART = ROOT / "helm/baton"
PROTOS = sorted((ROOT / "proto").rglob("*.proto"))


def messages_of(tree: ast.AST) -> Iterator[str]:
    """The texts of errors, logs and help among them: every literal that is no docstring."""
    docstrings = set(docstrings_of(tree))
    for node in nodes_of(tree):
        match node:
            case ast.Constant(str(text)) if text.strip() not in docstrings:
                yield text


def test_messages_of_the_product_avoid_private_words() -> None:
    found, num_messages = [], 0
    for path in product_files():
        for text in messages_of(tree_of(path)):
            num_messages += 1
            if AVOIDED.search(text):
                found.append(f"{path.relative_to(ROOT)}: {text}")
    assert num_messages > 5000
    assert not found


def remarks_of(source: str) -> Iterator[str]:
    """The docstrings and comments of a Python file."""
    yield from docstrings_of(ast.parse(source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_docstrings_and_comments_of_the_product_avoid_private_words() -> None:
    assert list(remarks_of('"""A."""\nx = "# b"  # c\n')) == ["A.", "# c"]
    found = []
    for path in product_files():
        source = path.read_text()
        if AVOIDED.search(source):
            found += [f"{path.relative_to(ROOT)}: {text}" for text in remarks_of(source) if AVOIDED.search(text)]
    for path in (ROOT / "kvstore").rglob("*.lua"):
        found += [f"{path.relative_to(ROOT)}: {line}" for line in path.read_text().splitlines() if AVOIDED.search(line)]
    assert not found


def test_pages_protos_and_the_chart_avoid_private_words() -> None:
    chart = [path for path in CHART.rglob("*") if path.is_file()]
    readmes = ("tests/bench/README.md", "tests/fakekube/README.md", "deploy/docker/README.md")
    scripts = [path for path in (ROOT / "router/api/page").iterdir() if path.suffix in (".html", ".css", ".js")]
    pages = [ROOT / page for page in PAGES] + [ROOT / name for name in readmes] + scripts
    assert {CHART / "values.yaml", CHART / "templates/NOTES.txt", CHART / "dashboards/overview.json"} <= set(chart)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*pages, *PROTOS, *chart)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if AVOIDED.search(line)
    ]
    assert not found


def comments_of(text: str, mark: str) -> Iterator[str]:
    """Each comment from its first line's text on; those that follow something on a line as well."""
    continues = False
    for line in text.splitlines():
        before, found, comment = line.partition(mark)
        if found and not (continues and not before.strip()):
            yield comment.strip()
        continues = bool(found)


def test_comments_of_protos_and_values_can_be_read_alone() -> None:
    comments = [comment for path in PROTOS for comment in comments_of(path.read_text(), "//")]
    assert len(comments) > 150
    comments += [comment for path in CHART.glob("values*.yaml") for comment in comments_of(path.read_text(), "#")]
    assert [comment for comment in comments if FRAGMENT.match(comment)] == []


def described(value: Any) -> Iterator[str]:
    """Titles, descriptions and what alerts say, at any depth."""
    match value:
        case dict():
            for key, inner in value.items():
                if key in ("title", "description", "summary", "runbook") and isinstance(inner, str):
                    yield inner
                yield from described(inner)
        case list():
            for inner in value:
                yield from described(inner)


def test_descriptions_of_the_chart_can_be_read_alone() -> None:
    texts = [*described(json.loads((CHART / "values.schema.json").read_text()))]
    for path in (CHART / "dashboards").glob("*.json"):
        texts += described(json.loads(path.read_text()))
    for folder in ("crds", "rules"):
        for path in (CHART / folder).glob("*.yaml"):
            texts += described(list(yaml.safe_load_all(path.read_text())))
    assert len(texts) > 400
    assert [text for text in texts if FRAGMENT.match(text)] == []
