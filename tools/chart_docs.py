"""Keeps what the chart says about its values true: `python -m tools.chart_docs` writes it anew.

    baton/config.py ──fields, docstrings, checks──> section `config` of helm/baton/values.schema.json
    values.schema.json ──descriptions──┐
    values.yaml ──defaults─────────────┴──────────> the tables of helm/baton/README.md

The rest of both files is written by hand.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from baton import config as baton_config
from baton.config import Config, FloatOrAuto

CHART = Path("helm/baton")
BEGIN, END = "<!-- values: written by `python -m tools.chart_docs` -->", "<!-- end of values -->"

SET_BY_CHART = {
    "model": {"path"},
    "index": {"redis_url"},
    "router": {"id", "cache_secret", "max_connection_age_s", "tenants_file"},
    "cluster": {
        *("advertise_host", "cache_dir", "controller_host", "controller_port", "decode", "gpus_per_worker"),
        *("grpc_port", "host", "http_port", "name", "prefill", "ray_address", "ray_node_ip", "routers", "state_file"),
    },
}
"""Settings that are not the user's: the chart knows them."""
CHART_SECTIONS = {"kubernetes"}
ONE_VALUE = {"resources"}
"""Definitions of the schema that get one line in the table."""
NUMBERS = {int: "integer", float: "number", str: "string", bool: "boolean"}

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """What only the text of baton/config.py says."""

    docs: dict[tuple[str, str], str]
    """Of (class, field)."""
    allowed: dict[str, list[str]]
    """`section.field` -> the values that `_require_one_of` lets through."""
    positive: set[str]
    """`section.field` of whole numbers from 1 on."""

    @staticmethod
    def read() -> Source:
        tree = ast.parse(inspect.getsource(baton_config))
        docs = {
            (cls.name, field.target.id): " ".join(text.split())
            for cls in tree.body
            if isinstance(cls, ast.ClassDef)
            for field, text in _documented(cls)
        }
        constants = {
            node.targets[0].id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        allowed: dict[str, list[str]] = {}
        positive: set[str] = set()
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            match call:
                case ast.Call(ast.Name("_require_one_of"), [ast.Constant(str(name)), _, values]):
                    allowed[name] = list(_strings(values, constants))
                case ast.Call(ast.Name("_require_at_least_one"), [ast.Constant(str(section)), _, names]):
                    positive |= {f"{section}.{name}" for name in _strings(names, constants)}
        return Source(docs, allowed, positive)


def _documented(cls: ast.ClassDef) -> Iterator[tuple[Any, str]]:
    """Fields that a string follows."""
    for field, after in zip(cls.body, cls.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name()), ast.Expr(ast.Constant(str(text))):
                yield field, text


def _strings(node: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    if isinstance(node, ast.Name):
        node = constants[node.id]
    yield from ast.literal_eval(node)


def config_schema() -> Schema:
    """Of the value `config`: what a file for `baton up --config` may hold, without what the chart sets."""
    source = Source.read()
    sections = {}
    for name, cls in typing.get_type_hints(Config).items():
        if name not in CHART_SECTIONS:
            skipped = SET_BY_CHART.get(name, set())
            sections[name] = _section(cls, f"{name}.", source, skipped)
    return {
        "description": "Settings of Baton itself, as in baton/config.py. The chart sets what only it knows.",
        "type": "object",
        "additionalProperties": False,
        "required": ["model", "router", "cluster"],
        "properties": sections,
    }


def _section(cls: Any, prefix: str, source: Source, skipped: set[str]) -> Schema:
    hints = typing.get_type_hints(cls)
    properties = {}
    for field in dataclasses.fields(cls):
        if field.name in skipped:
            continue
        name = prefix + field.name
        schema = _type(hints[field.name], name, source)
        description = source.docs.get((cls.__name__, field.name)) or _from_name(field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        properties[field.name] = {"description": description, "default": _plain(default), **schema}
    own_words = inspect.cleandoc(cls.__doc__ or "")
    description = "" if own_words.startswith(f"{cls.__name__}(") else " ".join(own_words.split())
    name = prefix.rstrip(".")
    return {
        "description": description or f"Settings of the {name}.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _from_name(name: str) -> str:
    """Of a field whose name says it all: `stop_timeout_s`."""
    words = name.removesuffix("_s").replace("_", " ").capitalize()
    return f"{words}, in seconds." if name.endswith("_s") else f"{words}."


def _type(kind: Any, name: str, source: Source) -> Schema:
    if typing.get_origin(kind) is dict:
        _, values = typing.get_args(kind)
        return {"type": "object", "additionalProperties": _section(values, f"{name}.", source, set())}
    if isinstance(kind, types.GenericAlias):
        return {"type": "array", "items": {"type": "string", **_limits(name, source)}}
    if kind == FloatOrAuto:
        return {"anyOf": [{"type": "number", "minimum": 0}, {"const": "auto"}]}
    return {"type": NUMBERS[kind], **_limits(name, source)}


def _limits(name: str, source: Source) -> Schema:
    if name in source.allowed:
        return {"enum": source.allowed[name]}
    return {"minimum": 1} if name in source.positive else {}


def _plain(value: Any) -> Any:
    """As in JSON, which knows no infinity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return None if value == math.inf else value


def schema_text(text: str) -> str:
    """values.schema.json with today's settings."""
    schema = json.loads(text)
    schema["properties"]["config"] = config_schema()
    return json.dumps(schema, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def readme_text(text: str, schema: Schema, defaults: dict[str, Any]) -> str:
    """README.md with today's tables."""
    tables = "\n\n".join(_tables(schema, defaults))
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n\n{tables}\n\n{END}", text, flags=re.DOTALL
    )


def _tables(schema: Schema, defaults: dict[str, Any]) -> Iterator[str]:
    small = []
    for name, value in schema["properties"].items():
        value = _resolved(value, schema)
        if name == "global":
            continue
        if "properties" not in value:
            small += list(_rows(name, value, defaults.get(name), schema))
            continue
        rows = list(_rows(name, value, defaults.get(name), schema))
        yield f"### `{name}`\n\n{value['description']}\n\n{_table(rows)}"
    yield f"### Others\n\n{_table(small)}"


def _rows(name: str, value: Schema, default: Any, schema: Schema) -> Iterator[str]:
    definition = value.get("$ref", "").removeprefix("#/definitions/")
    value = _resolved(value, schema)
    if "properties" in value and definition not in ONE_VALUE:
        inner = default if isinstance(default, dict) else {}
        for key, item in value["properties"].items():
            if name == "pools" and key == "decode":
                continue  # as `prefill`
            below = "ROLE" if name == "pools" else key
            if name == "pools.ROLE" and key not in inner:
                continue  # stands under `worker`
            yield from _rows(f"{name}.{below}", item, inner.get(key, item.get("default")), schema)
        return
    shown = json.dumps(value.get("default") if default is None else default, ensure_ascii=False)
    shown = shown.replace("prefill", "ROLE") if name.startswith("pools.") else shown
    choices = ", ".join(value.get("enum", ()))
    description = value["description"] + (f" One of: {choices}." if choices and choices not in _bare(value) else "")
    yield f"| `{name}` | `{shown}` | {description} |".replace("\n", " ")


def _bare(value: Schema) -> str:
    return str(value["description"]).replace(" or ", ", ")


def _resolved(value: Schema, schema: Schema) -> Schema:
    """A reference's target, described by who refers to it."""
    if "$ref" not in value:
        return value
    target: Schema = schema["definitions"][value["$ref"].removeprefix("#/definitions/")]
    return {**target, **{key: item for key, item in value.items() if key != "$ref"}}


def _table(rows: list[str]) -> str:
    return "\n".join(["| Value | Default | |", "|---|---|---|", *rows])


def written(chart: Path) -> dict[Path, str]:
    """What the generated files should hold."""
    schema_path, readme_path = chart / "values.schema.json", chart / "README.md"
    schema = schema_text(schema_path.read_text())
    defaults = yaml.safe_load((chart / "values.yaml").read_text())
    return {schema_path: schema, readme_path: readme_text(readme_path.read_text(), json.loads(schema), defaults)}


def main() -> None:
    for path, text in written(CHART).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
