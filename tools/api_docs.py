"""Generates the tables of docs/http.md: `python -m tools.api_docs`.

They say of each field of a body what becomes of it, as each API declares it, and what operators may ask. The rest of
the page is written by hand.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from router.api.apis import APIS
from router.api.document import Endpoint, OperatorCall
from router.api.fields import Refusal, WithoutEffect
from router.api.unserved import ANTHROPICS, OPENAIS
from tools.chart_docs import between

PAGE = Path("docs/http.md")
BEGIN, END = "<!-- fields: written by `python -m tools.api_docs` -->", "<!-- end of fields -->"


def tables() -> str:
    """The tables of all bodies, of what operators may ask, and of what is not served at all."""
    lines = []
    for api in APIS:
        for path, endpoint in api.endpoints.items():
            lines += [f"## {path}", "", "| Field | |", "|---|---|", *_rows(endpoint), ""]
    lines += ["## For operators", "", "| Call | Asked with | |", "|---|---|---|"]
    lines += [_call(path, call) for api in APIS for path, call in api.calls.items()] + [""]
    lines += ["## What is not served", "", "| Path, and what is below it | Why |", "|---|---|"]
    lines += [f"| `{path}` | {why} |" for path, why in sorted({**OPENAIS, **ANTHROPICS}.items())]
    return "\n".join([*lines, ""])


def _call(path: str, call: OperatorCall) -> str:
    names = call.body.model_fields if call.body else call.query
    asked = ", ".join(f"`{name}`" for name in names)
    key = " Needs an operator's key." if call.body else ""
    return f"| `{call.method.upper()} {path}` | {asked} | {call.summary}{key} |"


def _rows(endpoint: Endpoint) -> list[str]:
    fields = endpoint.body.model_fields
    rows = {name: _declared(field) or "served" for name, field in fields.items()}
    rows |= {name: _without_effect(why) for name, why in endpoint.without_effect.items()}
    rows |= {name: _refused(refusal) for name, refusal in endpoint.refused.items() if name not in fields}
    for name, field in fields.items():
        rows |= _at_depth(field.annotation, name)
    return [f"| `{name}` | {text} |" for name, text in sorted(rows.items())]


def _at_depth(annotation: Any, where: str) -> dict[str, str]:
    """What is not served of the fields of a field, by their paths."""
    if typing.get_origin(annotation) is list:
        where += "[]"
    rows: dict[str, str] = {}
    for inner in typing.get_args(annotation):
        rows |= _at_depth(inner, where)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            path = f"{where}.{field.alias or name}"
            if declared := _declared(field):
                rows[path] = declared
            rows |= _at_depth(field.annotation, path)
    return rows


def _declared(field: FieldInfo) -> str:
    """What a field says of itself; empty: it is served."""
    for each in field.metadata:
        match each:
            case Refusal():
                return _refused(each)
            case WithoutEffect(why):
                return _without_effect(why)
    return ""


def _without_effect(why: str) -> str:
    return f"taken, without effect: {why}"


def _refused(refusal: Refusal) -> str:
    values = ", ".join(f"`{json.dumps(value)}`" for value in refusal.neutral)
    return f"refused{f' but for {values}' if values else ''}: {refusal.why}"


def written(page: Path) -> str:
    """The page with today's tables."""
    return between(page.read_text(encoding="utf-8"), BEGIN, tables(), END)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE), encoding="utf-8")
