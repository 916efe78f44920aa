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

from router.admission.tenants import TenantBook
from router.api.apis import document
from router.api.browsers import FOR_OPERATORS
from router.api.fields import DeclaredBody, Refusal, WithoutEffect
from router.api.http import create_app
from router.api.routes import BodyRoute
from router.api.unserved import ANTHROPICS, OPENAIS
from tools.chart_docs import between

PAGE = Path("docs/http.md")
BEGIN, END = "<!-- fields: written by `python -m tools.api_docs` -->", "<!-- end of fields -->"


_NOTHING: Any = object()
ROUTES = create_app(_NOTHING, TenantBook.open_to_all(), str, bytes, operations=_NOTHING).routes
"""The endpoints of a router, which describe themselves but have nothing behind them."""
BODIES = {
    route.path: route.body
    for route in ROUTES
    if isinstance(route, BodyRoute) and route.body and not route.path.startswith(FOR_OPERATORS)
}
"""Path -> the body that clients send there."""


def tables() -> str:
    """The tables of all bodies, of what operators may ask, and of what is not served at all."""
    lines = []
    for path, body in BODIES.items():
        lines += [f"## {path}", "", "| Field | |", "|---|---|", *_rows(body), ""]
    whole = document(ROUTES)
    schemas = whole["components"]["schemas"]
    lines += ["## For operators", "", "| Call | Asked with | |", "|---|---|---|"]
    for path, item in whole["paths"].items():
        if path.startswith(FOR_OPERATORS) or path == "/version":
            lines += [_call(f"{method.upper()} {path}", each, schemas) for method, each in item.items()]
    lines += ["", "## What is not served", "", "| Path, and what is below it | Why |", "|---|---|"]
    lines += [f"| `{path}` | {why} |" for path, why in sorted({**OPENAIS, **ANTHROPICS}.items())]
    return "\n".join([*lines, ""])


def _call(call: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    names = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
    if "requestBody" in operation:
        body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        names += schemas[body.rpartition("/")[2]]["properties"]
    key = " Needs an operator's key." if "security" in operation else ""
    return f"| `{call}` | {', '.join(f'`{name}`' for name in names)} | {operation['summary']}{key} |"


def _rows(body: type[BaseModel]) -> list[str]:
    fields = body.model_fields
    rows = {name: _declared(field) or "served" for name, field in fields.items()}
    if issubclass(body, DeclaredBody):
        rows |= {name: _without_effect(why) for name, why in body.without_effect.items()}
        rows |= {name: _refused(refusal) for name, refusal in body.refused.items() if name not in fields}
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
