"""Generates the tables of docs/http.md: `python -m tools.api_docs`.

They say of each field of a body what becomes of it, as each API declares it. The rest of the page is written
by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

from router.api.apis import APIS
from router.api.document import Endpoint
from router.api.fields import Refusal

PAGE = Path("docs/http.md")
BEGIN, END = "<!-- fields: written by `python -m tools.api_docs` -->", "<!-- end of fields -->"


def tables() -> str:
    """The tables of all bodies."""
    lines = []
    for api in APIS:
        for path, endpoint in api.endpoints.items():
            lines += [f"## {path}", "", "| Field | |", "|---|---|", *_rows(endpoint), ""]
    return "\n".join(lines)


def _rows(endpoint: Endpoint) -> list[str]:
    fields = endpoint.body.model_fields
    rows = dict.fromkeys(fields, "served")
    rows |= {name: f"taken, without effect: {why}" for name, why in endpoint.without_effect.items()}
    rows |= {name: _refused(refusal) for name, refusal in endpoint.refused.items() if name not in fields}
    return [f"| `{name}` | {text} |" for name, text in sorted(rows.items())]


def _refused(refusal: Refusal) -> str:
    values = ", ".join(f"`{_json(value)}`" for value in refusal.neutral)
    return f"refused{f' but for {values}' if values else ''}: {refusal.why}"


def _json(value: object) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def written(page: Path) -> str:
    """The page with today's tables."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{tables()}\n{END}", page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE), encoding="utf-8")
