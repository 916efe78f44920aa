"""The types of objects: those of Kubernetes' own kinds out of kubernetes-validate, those of others out of their CRD."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from kubernetes_validate.utils import SchemaNotFoundError, schema_contents  # type: ignore[import-untyped]
from referencing import Registry, Resource

from tests.fakekube.store import Object

VERSION = "1.35.0"
FOLDER = f"kubernetes-json-schema/v{VERSION}-local"
OBJECT_META = "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
KEY_DEFAULTS = {"protocol": "TCP"}
"""Parts of a list's key that a client may leave out."""


class Schema:
    """A node of an OpenAPI schema, with `$ref` followed."""

    def __init__(self, node: Object, custom: bool) -> None:
        self.node = _resolved(node)
        self._custom = custom and "$ref" not in node

    def field(self, name: str) -> Schema:
        """Of a field that has no type of its own: one that allows anything."""
        extra = self.node.get("additionalProperties")
        found = self.node.get("properties", {}).get(name, extra if isinstance(extra, dict) else ANYTHING)
        return Schema(found, self._custom)

    def item(self) -> Schema:
        return Schema(self.node.get("items", ANYTHING), self._custom)

    @property
    def atomic(self) -> bool:
        """An object that is replaced as a whole."""
        return self.node.get("x-kubernetes-map-type") == "atomic"

    @property
    def list_keys(self) -> tuple[str, ...]:
        """The fields that tell the items of a list apart, for server-side apply. Empty: it is no such list."""
        return tuple(self.node.get("x-kubernetes-list-map-keys", ()))

    @property
    def is_set(self) -> bool:
        return self.node.get("x-kubernetes-list-type") == "set"

    @property
    def patch_strategy(self) -> str:
        """Of strategic merge patches."""
        return str(self.node.get("x-kubernetes-patch-strategy", ""))

    @property
    def patch_key(self) -> str:
        return str(self.node.get("x-kubernetes-patch-merge-key", ""))

    def prune(self, value: Any, path: str = "") -> list[str]:
        """Removes the fields that the schema does not know. Returns their paths."""
        found: list[str] = []
        if isinstance(value, dict):
            for name in list(value):
                if self._knows(name):
                    found += self.field(name).prune(value[name], f"{path}.{name}".lstrip("."))
                else:
                    found.append(f"{path}.{name}".lstrip("."))
                    del value[name]
        elif isinstance(value, list):
            for index, item in enumerate(value):
                found += self.item().prune(item, f"{path}[{index}]")
        return found

    def fill(self, value: Any) -> None:
        """Sets the defaults. A null where null is no value counts as left out when there is a default."""
        if isinstance(value, dict):
            for name, node in self.node.get("properties", {}).items():
                known = _resolved(node)
                if "default" in known and (name not in value or (value[name] is None and not known.get("nullable"))):
                    value[name] = json.loads(json.dumps(known["default"]))
            for name, part in value.items():
                self.field(name).fill(part)
        elif isinstance(value, list):
            for item in value:
                self.item().fill(item)

    def errors(self, value: Object) -> list[ValidationError]:
        return sorted(self._validator.iter_errors(value), key=lambda error: error.json_path)

    @cached_property
    def _validator(self) -> Draft202012Validator:
        if self._custom:
            return Draft202012Validator(_json_schema(self.node))
        return Draft202012Validator(self.node, registry=_registry())

    def _knows(self, name: str) -> bool:
        node = self.node
        if name in node.get("properties", {}) or node.get("additionalProperties"):
            return True
        if self._custom:
            return bool(node.get("x-kubernetes-preserve-unknown-fields"))
        return "properties" not in node


ANYTHING: Object = {"x-kubernetes-preserve-unknown-fields": True}


@cache
def builtin(kind: str, api_version: str) -> Schema:
    """Raises SchemaNotFoundError."""
    group, _, version = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], version) if part)
    try:
        return Schema(schema_contents(f"{FOLDER}/{name}.json", VERSION), custom=False)
    except FileNotFoundError:
        raise SchemaNotFoundError(kind, VERSION, api_version) from None


def of_custom(openapi: Object) -> Schema:
    """The schema of a custom resource: what its CRD says, and what every object has."""
    shared: Object = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"$ref": OBJECT_META},
    }
    return Schema(openapi | {"properties": openapi.get("properties", {}) | shared}, custom=True)


@cache
def _definitions() -> dict[str, Object]:
    found: dict[str, Object] = schema_contents(f"{FOLDER}/_definitions.json", VERSION)["$defs"]
    return found


@cache
def _registry() -> Registry[Any]:
    whole = schema_contents(f"{FOLDER}/_definitions.json", VERSION)
    registry: Registry[Any] = Resource.from_contents(whole) @ Registry()
    return registry


def _resolved(node: Object) -> Object:
    if "$ref" not in node:
        return node
    beside = {name: part for name, part in node.items() if name != "$ref"}
    return _definitions()[node["$ref"].rpartition("/")[2]] | beside


KEPT = (
    "pattern",
    "minimum",
    "maximum",
    "multipleOf",
    "required",
    "enum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "uniqueItems",
)
INTEGERS = {"int32": 2**31, "int64": 2**63}


def _json_schema(node: Object) -> Object:
    """A CRD's OpenAPI v3 schema as JSON Schema."""
    made = {name: node[name] for name in KEPT if name in node}
    types = [node["type"]] if isinstance(node.get("type"), str) else list(node.get("type", ()))
    if node.get("x-kubernetes-int-or-string"):
        types = ["integer", "string"]
    if types:
        made["type"] = types + ["null"] * bool(node.get("nullable"))
    if node.get("format") in INTEGERS and types == ["integer"]:
        limit = INTEGERS[node["format"]]
        made["minimum"] = max(node.get("minimum", -limit), -limit)
        made["maximum"] = min(node.get("maximum", limit - 1), limit - 1)
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if node.get(exclusive):
            made[exclusive] = made.pop(bound)
    return made | dict(_parts(node))


def _parts(node: Object) -> Iterator[tuple[str, Any]]:
    for name in ("items", "additionalProperties", "not"):
        if isinstance(node.get(name), dict):
            yield name, _json_schema(_resolved(node[name]))
    for name in ("allOf", "anyOf", "oneOf"):
        if name in node:
            yield name, [_json_schema(part) for part in node[name]]
    if "properties" in node:
        yield "properties", {name: _json_schema(_resolved(part)) for name, part in node["properties"].items()}
