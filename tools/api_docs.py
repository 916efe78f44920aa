"""Generates the tables of docs/http.md: `python -m tools.api_docs`.

They say of each field of a body what becomes of it, as `router.api.openai.fields` declares it. The rest of the page is
written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from router.api.openai.document import BODIES, STREAMED
from router.api.openai.fields import REFUSED, WITHOUT_EFFECT

PAGE = Path("docs/http.md")
BEGIN, END = "<!-- fields: written by `python -m tools.api_docs` -->", "<!-- end of fields -->"


def tables() -> str:
    """The tables of all bodies."""
    lines = []
    for path, body in BODIES.items():
        lines += [f"## {path}", "", "| Field | |", "|---|---|", *_rows(body, takes_others=path in STREAMED), ""]
    return "\n".join(lines)


def _rows(body: type[BaseModel], *, takes_others: bool) -> list[str]:
    rows = dict.fromkeys(body.model_fields, "served")
    if takes_others:
        rows |= {name: f"taken, without effect: {why}" for name, why in WITHOUT_EFFECT.items()}
        for name, refusal in REFUSED.items():
            if name not in body.model_fields:
                values = ", ".join(f"`{_json(value)}`" for value in refusal.neutral)
                rows[name] = f"refused{f' but for {values}' if values else ''}: {refusal.why}"
    return [f"| `{name}` | {text} |" for name, text in sorted(rows.items())]


def _json(value: object) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def written(page: Path) -> str:
    """The page with today's tables."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{tables()}\n{END}", page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE), encoding="utf-8")
