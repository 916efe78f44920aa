"""Generates the tables of docs/configuration.md, docs/engines.md and docs/grpc.md: `python -m tools.reference_docs`.

    baton/config ────── JSON schema by pydantic ──> every setting, its default and its description
    baton/config/engine.py ──── VLLM_ARGS ────────> every argument that is passed on to vLLM
    public protos ───── their comments ───────────> every method and field of both services
    baton/errors.py ─── the tree that it draws ───> every error, its status and its code

The rest of these pages is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from baton import errors
from baton.config import Config
from baton.config.engine import VLLM_ARGS
from baton.config.load import SHORT_NAMES
from baton.config.section import is_listed
from tools.chart_docs import between, described_settings, one_line

ROOT = Path(__file__).parents[1]
SETTINGS_PAGE, GRPC_PAGE, ENGINES_PAGE = Path("docs/configuration.md"), Path("docs/grpc.md"), Path("docs/engines.md")
BEGIN, END = "<!-- written by `python -m tools.reference_docs` -->", "<!-- end -->"
PUBLIC = ("inference", "admin")
VARIABLES = {f"{section}.{field}": name for name, (section, field) in SHORT_NAMES.items()}
"""Settings whose environment variable is not made of section and field."""


def settings_tables() -> str:
    """The tables of all settings, a section each."""
    schema = described_settings()
    defaults = json.loads(TypeAdapter(Config).dump_json(Config()))
    lines = []
    for name, value in schema["properties"].items():
        if not is_listed(Config, name):
            continue
        section = schema["$defs"][value["$ref"].removeprefix("#/$defs/")]
        lines += [f"## {name}", "", one_line(section["description"]), "", "| Setting | Default | |", "|---|---|---|"]
        lines += [*_settings(name, section, schema["$defs"], defaults[name]), ""]
    return "\n".join(lines)


def _settings(name: str, section: dict[str, Any], definitions: dict[str, Any], defaults: Any) -> Iterator[str]:
    """The rows of a section, and of the sections in it."""
    for key, field in section["properties"].items():
        if "$ref" in field:
            inner = definitions[field["$ref"].removeprefix("#/$defs/")]
            yield from _settings(f"{name}.{key}", inner, definitions, defaults[key])
        else:
            yield _setting(f"{name}.{key}", field, defaults.get(key))


def _setting(name: str, field: dict[str, Any], default: Any) -> str:
    text = one_line(field.get("description", ""))
    if choices := field.get("enum", ()):
        text += f" One of: {', '.join(f'`{choice}`' for choice in choices)}."
    if name in VARIABLES:
        text += f" In the environment: `{VARIABLES[name]}`."
    shown = "unlimited" if default is None else f"`{json.dumps(default, ensure_ascii=False)}`"
    return f"| `{name}` | {shown} | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


@dataclass(frozen=True, slots=True)
class ProtoLine:
    """A line of a proto's block, with the comment before it."""

    text: str
    comment: str


@dataclass(frozen=True, slots=True)
class Block:
    """A service or a message."""

    kind: str
    name: str
    comment: str
    entries: tuple[ProtoLine, ...]


def blocks_of(proto: str) -> Iterator[Block]:
    """The services and messages of a proto, in its order; what is in a oneof says so."""
    head, comment, within, entries = ("", "", ""), "", "", list[ProtoLine]()
    for line in map(str.strip, proto.splitlines()):
        if line.startswith("//"):
            comment = f"{comment} {line[2:].strip()}".strip()
            continue
        if found := re.match(r"(service|message) (\w+) \{(\}?)", line):
            head, entries = (found[1], found[2], comment), []
            if found[3]:
                yield Block(*head, ())
                head = ("", "", "")
        elif found := re.match(r"oneof (\w+) \{", line):
            within = found[1]
        elif line == "}" and within:
            within = ""
        elif line == "}" and head[0]:
            yield Block(*head, tuple(entries))
            head = ("", "", "")
        elif head[0] and line.endswith(";"):
            of = f"One of `{within}`. " if within else ""
            entries.append(ProtoLine(line.rstrip(";"), of + comment))
        comment = ""


def grpc_tables() -> str:
    """The tables of the public services and their messages, and of the errors."""
    lines: list[str] = []
    for proto in PUBLIC:
        for block in blocks_of((ROOT / f"proto/baton/v1/{proto}.proto").read_text(encoding="utf-8")):
            lines += [f"## {block.name}", "", *([block.comment, ""] if block.comment else []), *_entries(block), ""]
    return "\n".join([*lines, *_errors(), ""])


def _entries(block: Block) -> list[str]:
    if not block.entries:
        return ["It has no fields."]
    rows = ["| Method | |" if block.kind == "service" else "| Field | Type | |"]
    rows.append("|---|---|" if block.kind == "service" else "|---|---|---|")
    for entry in block.entries:
        if called := re.match(r"rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\)", entry.text):
            name, asked, stream, answered = called.groups()
            rows.append(f"| `{name}({asked})` | {stream or ''}`{answered}`. {_cell(entry.comment)} |")
        elif field := re.match(r"(.+) (\w+) = \d+$", entry.text):
            rows.append(f"| `{field[2]}` | `{field[1]}` | {_cell(entry.comment)} |")
    return rows


def _errors() -> list[str]:
    tree = re.findall(r"[├└]── (\w+) +([A-Z_]+) +(\d{3}) *(.*)", errors.__doc__ or "")
    rows = ["## Errors", "", "| Error | gRPC | HTTP | |", "|---|---|---|---|"]
    return rows + [f"| {kind} | {status} | {code} | {_cell(text)} |" for kind, status, code, text in tree]


def vllm_arguments() -> str:
    """The table of the arguments that `engine.vllm_args` may contain."""
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in sorted(VLLM_ARGS.items())]
    return "\n".join(["| Argument | |", "|---|---|", *rows, ""])


def written() -> dict[Path, str]:
    """The pages with today's tables, by their paths in the repository."""
    pages = {SETTINGS_PAGE: settings_tables(), GRPC_PAGE: grpc_tables(), ENGINES_PAGE: vllm_arguments()}
    return {
        page: between((ROOT / page).read_text(encoding="utf-8"), BEGIN, tables, END) for page, tables in pages.items()
    }


if __name__ == "__main__":
    for path, content in written().items():
        (ROOT / path).write_text(content, encoding="utf-8")
