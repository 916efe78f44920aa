"""Makes a site of the documents: hooks of mkdocs, which `make docs` runs (`mkdocs.yml`).

    README.md, docs/, and pages that stand beside what they describe (OUTSIDE) ──> pages of the site
    links between them                                                        ──> links within the site
    links to other files of the repository                                    ──> links to where it is published

Documents are written for readers of the repository: every link is relative to its file. Where it is not known where the
repository is published (`REPOSITORY_URL`), what leads to other files is shown as text.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/docker/README.md",
    "examples/README.md",
    "helm/baton/README.md",
    "tests/bench/README.md",
    "tests/fakekube/README.md",
    "tests/gpu/README.md",
)
"""Pages that are not in docs/, by their paths in the repository, which are their paths in the site."""
HOME = "README.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
NEEDS = re.compile(r"<!-- needs: (.+) -->")
"""The mark of commands that want more than a machine; the site shows it."""
FENCE = re.compile(r"^(?: {0,3}```.*?^ {0,3}```[ \t]*$)", re.MULTILINE | re.DOTALL)
Nav = list[Any]


def pages(root: Path = ROOT) -> list[str]:
    """The pages of the site, by their paths there."""
    docs = (path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md"))
    return sorted({HOME, *OUTSIDE, *docs})


def source_of(page: str) -> str:
    """The path in the repository of what is a page of the site."""
    return page if page in (HOME, *OUTSIDE) else f"docs/{page}"


def page_of(source: str) -> str | None:
    """The path in the site of a file of the repository; None: it is not there."""
    if source in (HOME, *OUTSIDE):
        return source
    return source.removeprefix("docs/") if source.startswith("docs/") else None


def named(nav: Nav) -> Iterator[str]:
    """Every page and pattern of the navigation, in its order."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else (entry,):
            yield from named(value) if isinstance(value, list) else (value,)


def expanded(nav: Nav, known: Sequence[str]) -> Nav:
    """The navigation with its patterns replaced by the pages that they match.

    A pattern, such as `runbook/*`, takes the pages that no other entry names; the first pattern has them, a folder's
    README stands before the others, and a section that is left without pages is left out.
    """
    taken = {entry for entry in named(nav) if "*" not in entry}
    return _expanded(nav, [page for page in known if page not in taken])


def _expanded(nav: Nav, free: list[str]) -> Nav:
    found: Nav = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            matched = [page for page in free if fnmatch.fnmatch(page, entry)]
            free[:] = [page for page in free if page not in matched]
            found += sorted(matched, key=lambda page: (not page.endswith("README.md"), page))
        elif isinstance(entry, dict):
            (title, value) = next(iter(entry.items()))
            inner = _expanded(value, free) if isinstance(value, list) else value
            found += [{title: inner}] if inner else []
        else:
            found.append(entry)
    return found


def navigation(root: Path = ROOT) -> Nav:
    """The navigation of mkdocs.yml, without the rest of it, whose tags are mkdocs' own."""
    text = (root / "mkdocs.yml").read_text(encoding="utf-8")
    nav: Nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    return nav


def for_site(text: str, page: str, repository: str) -> str:
    """A page's Markdown with the links of the repository turned into links of the site.

    Args:
        repository: the address under which the repository's files are shown, such as https://HOST/OWNER/NAME/blob/main;
            empty: not known.
    """
    beyond, at = [], 0
    for fence in FENCE.finditer(text):
        beyond += [_linked(text[at : fence.start()], page, repository), fence[0]]
        at = fence.end()
    return NEEDS.sub(r"*Needs \1:*\n", "".join([*beyond, _linked(text[at:], page, repository)]))


def _linked(text: str, page: str, repository: str) -> str:
    def replaced(found: re.Match[str]) -> str:
        image, label, link = found.groups()
        target, mark, anchor = link.partition("#")
        if not target or ":" in target:
            return found[0]
        source = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), target))
        within = page_of(source)
        if within is not None and not (ROOT / source).is_dir():
            relative = posixpath.relpath(within, posixpath.dirname(page) or ".")
            return f"{image}[{label}]({relative}{mark}{anchor})"
        return f"[{label}]({repository}/{source}{mark}{anchor})" if repository else label

    return LINK.sub(replaced, text)


def on_config(config: Any) -> Any:
    """Hook: the navigation is expanded, and headings get the anchors that they have where repositories are shown."""
    from pymdownx.slugs import slugify
    from pymdownx.superfences import fence_code_format

    config["nav"] = expanded(config["nav"], pages())
    config["mdx_configs"].setdefault("toc", {}).update({"slugify": slugify(case="lower"), "permalink": True})
    mermaid = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config["mdx_configs"]["pymdownx.superfences"] = {"custom_fences": [mermaid]}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Hook: pages from outside of docs/ join the others."""
    from mkdocs.structure.files import File

    for page in (HOME, *OUTSIDE):
        files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Hook: links are turned before they are checked."""
    return for_site(markdown, page.file.src_uri, os.environ.get("REPOSITORY_URL", "").rstrip("/"))
