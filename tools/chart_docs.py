"""Generates the documentation of the chart's values: `python -m tools.chart_docs`.

    baton/config ──JSON schema by pydantic────────> section `config` of helm/baton/values.schema.json
    values.schema.json ──descriptions──┐
    values.yaml ──defaults─────────────┴──────────> the tables of helm/baton/README.md

The rest of both files is written by hand.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter
from pydantic_core import to_json

from baton import config
from baton.config import Config
from baton.config.section import is_listed

CHART = Path("helm/baton")
BEGIN, END = "<!-- values: written by `python -m tools.chart_docs` -->", "<!-- end of values -->"

SET_BY_CHART = {
    "model": {"path"},
    "index": {"redis_url", "redis_password_file"},
    "router": {"id", "cache_secret", "max_connection_age_s", "picker_port", "tenants_file", "tls_client_certificates"},
    "cluster": {
        *("advertise_host", "cache_dir", "controller_host", "controller_port", "decode", "gpus_per_worker"),
        *("grpc_port", "host", "http_port", "max_surge", "max_unavailable", "name", "prefill", "ray_address"),
        *("ray_node_ip", "routers", "secret", "state_file"),
    },
    "telemetry": {"host", "port"},
}
"""Settings that are not the user's: the chart knows them."""
CHART_SECTIONS = {"kubernetes", "pools"}
UNLISTED = {field.name for field in fields(Config) if not is_listed(Config, field.name)}
"""Sections that the chart takes and its README does not name."""
ONE_VALUE = {"resources", "imagePart"}
"""Definitions of the schema that get one line in the table."""
ONE_NAME = {"pools.ROLE.engine"}
"""Values that get one line."""

Schema = dict[str, Any]


def config_schema() -> Schema:
    """Schema of the value `config`: what a file for `baton up --config` may hold, without what the chart sets."""
    schema = described_settings()
    defaults = json.loads(TypeAdapter(Config).dump_json(Config()))  # a function makes some: the schema has none
    sections = {
        name: _section(section, schema["$defs"], defaults[name], SET_BY_CHART.get(name, set()))
        for name, section in schema["properties"].items()
        if name not in CHART_SECTIONS | UNLISTED
    }
    sections |= {name: {"description": "Tests of Baton itself.", "type": "object"} for name in UNLISTED}
    return {
        "description": "Settings of Baton itself, as in baton/config. The chart sets what only it knows.",
        "type": "object",
        "additionalProperties": False,
        "required": ["model", "router", "cluster"],
        "properties": sections,
    }


def pool_engine_schema(schema: Schema) -> Schema:
    """Schema of the value `pools.ROLE.engine`: the settings of `config.engine` that may differ between the pools."""
    settings = schema["properties"]["config"]["properties"]["engine"]["properties"]
    return {
        "additionalProperties": False,
        "properties": {
            name: {key: value for key, value in each.items() if key != "default"}
            for name, each in settings.items()
            if name in config.POOL_SETTINGS
        },
    }


def described_settings() -> Schema:
    """The schema of all settings, as pydantic has it, with the descriptions that stand behind them in the source."""
    schema: Schema = json.loads(to_json(TypeAdapter(Config).json_schema(), inf_nan_mode="null"))
    for name, definition in schema["$defs"].items():
        for key, text in _docstrings(getattr(config, name)).items():
            definition["properties"][key]["description"] = text
    return schema


def _docstrings(section: type[Any]) -> dict[str, str]:
    """Returns the docstring after each field of a section, and of those that it extends."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__[:-1]):
        (node,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(node, ast.ClassDef)
        for field, after in itertools.pairwise(node.body):
            match field, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


def _section(section: Schema, definitions: Schema, defaults: Any, skipped: set[str]) -> Schema:
    """The section in the form of the rest of the file: no references and titles, every description in one line."""
    section = definitions[section["$ref"].removeprefix("#/$defs/")]
    properties = {}
    for name, value in section["properties"].items():
        if name in skipped:
            continue
        own = {key: item for key, item in value.items() if key not in ("title", "description", "default")}
        # Of a mapping: a section, True for any value, or nothing.
        if isinstance(inner := own.get("additionalProperties"), dict) and "$ref" in inner:
            own["additionalProperties"] = _section(inner, definitions, {}, set())
        default = value.get("default", defaults.get(name))
        properties[name] = {"description": one_line(value["description"]), "default": default, **own}
    return {
        "description": one_line(section["description"]),
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def one_line(text: str) -> str:
    return " ".join(text.split())


def between(text: str, begin: str, tables: str, end: str) -> str:
    """The text with today's tables between the two marks."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{tables}\n{end}{rest.partition(end)[2]}"


def schema_text(text: str) -> str:
    """values.schema.json with today's settings."""
    schema = json.loads(text)
    schema["properties"]["config"] = config_schema()
    for pool in schema["properties"]["pools"]["properties"].values():
        pool["properties"]["engine"] |= pool_engine_schema(schema)
    return json.dumps(schema, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def readme_text(text: str, schema: Schema, defaults: dict[str, Any]) -> str:
    """README.md with today's tables."""
    return between(text, BEGIN, "\n\n".join(_tables(schema, defaults)) + "\n", END)


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
    if name.removeprefix("config.") in UNLISTED:
        return
    if "properties" in value and definition not in ONE_VALUE and name not in ONE_NAME:
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
    """The texts of the generated files, by path."""
    schema_path, readme_path = chart / "values.schema.json", chart / "README.md"
    schema = schema_text(schema_path.read_text())
    defaults = yaml.safe_load((chart / "values.yaml").read_text())
    return {schema_path: schema, readme_path: readme_text(readme_path.read_text(), json.loads(schema), defaults)}


def main() -> None:
    for path, text in written(CHART).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
