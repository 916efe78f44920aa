"""The rules of a CRD (`x-kubernetes-validations`): as much of CEL, the Common Expression Language, as those need."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from tests.fakekube.schema import Schema

TOKEN = re.compile(r"""(?P<text>"[^"]*"|'[^']*')|(?P<sign>&&|\|\||!=|!)|(?P<word>\b(?:true|false|null)\b)""")
PYTHON = {"&&": " and ", "||": " or ", "!": " not ", "!=": "!=", "true": "True", "false": "False", "null": "None"}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
}
SUMS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
}
METHODS: dict[str, Callable[[str, str], bool]] = {
    "startsWith": str.startswith,
    "endsWith": str.endswith,
    "contains": str.__contains__,
    "matches": lambda text, pattern: re.search(pattern, text) is not None,
}


class Unknown(Exception):
    """The rule uses something that is not known here."""


def broken(schema: Schema, value: Any, old: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Where a rule is broken, and what it says. A rule with `oldSelf` counts only where there was a value before.

    Raises:
        Unknown.
    """
    for rule in schema.node.get("x-kubernetes-validations") or ():
        text = rule["rule"]
        if "oldSelf" in text and old is None:
            continue
        try:
            holds = _value(_parsed(text), {"self": value, "oldSelf": old})
        except KeyError as missing:
            yield path, f"rule evaluation error: no such key: {missing.args[0]}"
            continue
        if not holds:
            yield path, rule.get("message") or f"failed rule: {text}"
    if isinstance(value, dict):
        for name, part in value.items():
            before = old.get(name) if isinstance(old, dict) else None
            yield from broken(schema.field(name), part, before, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from broken(schema.item(), item, None, f"{path}[{index}]")


@cache
def _parsed(rule: str) -> ast.expr:
    text = TOKEN.sub(lambda found: found["text"] or PYTHON[found[0]], rule)
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise Unknown(rule) from None


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name) if name in names:
            return names[name]
        case ast.List(items):
            return [_value(item, names) for item in items]
        case ast.Attribute(of, name):
            return _value(of, names)[name]
        case ast.Subscript(of, index):
            return _value(of, names)[_value(index, names)]
        case ast.BoolOp(ast.And(), parts):
            return all(_value(part, names) for part in parts)
        case ast.BoolOp(ast.Or(), parts):
            return any(_value(part, names) for part in parts)
        case ast.UnaryOp(ast.Not(), part):
            return not _value(part, names)
        case ast.UnaryOp(ast.USub(), part):
            return -_value(part, names)
        case ast.BinOp(left, sign, right) if type(sign) in SUMS:
            return SUMS[type(sign)](_value(left, names), _value(right, names))
        case ast.Compare(left, [sign], [right]) if type(sign) in COMPARISONS:
            return COMPARISONS[type(sign)](_value(left, names), _value(right, names))
        case ast.Call(ast.Name("has"), [ast.Attribute(of, name)]):
            return name in _value(of, names)
        case ast.Call(ast.Name("size"), [part]):
            return len(_value(part, names))
        case ast.Call(ast.Attribute(of, name), [part]) if name in METHODS:
            return METHODS[name](_value(of, names), _value(part, names))
    raise Unknown(ast.unparse(node))
