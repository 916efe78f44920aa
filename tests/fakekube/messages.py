"""What goes into the API server and what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.fakekube import protobuf
from tests.fakekube.kinds import Kind
from tests.fakekube.selectors import fields_match, labels_match
from tests.fakekube.status import Refused, bad_request
from tests.fakekube.store import Key, Object

APPLY = "application/apply-patch+yaml"
HEAD = ("apiVersion", "kind", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    user: str
    body: bytes = b""
    content_type: str = ""
    accept: str = ""
    agent: str = ""

    @property
    def dry_run(self) -> bool:
        return "dryRun" in self.query

    @property
    def field_validation(self) -> str:
        return self.query.get("fieldValidation") or "Warn"

    @property
    def manager(self) -> str:
        return self.query.get("fieldManager") or self.agent.partition("/")[0] or "unknown"

    @property
    def wants_table(self) -> bool:
        """As `kubectl get` asks, for people to read."""
        return "as=Table" in self.accept and "v=v1;" in self.accept.replace(",", ";")

    def flag(self, name: str) -> bool:
        return self.query.get(name, "") in ("1", "true", "True")


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    code: int
    body: Object = field(default_factory=dict)
    content_type: str = "application/json"
    warnings: list[str] = field(default_factory=list)
    stream: Iterator[bytes] | None = None
    """Instead of a body. Empty pieces come while there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names."""

    kind: Kind
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> Key:
        return Key(self.kind.resource, self.namespace, self.name)


def parsed(body: bytes) -> Any:
    """JSON, YAML or protobuf."""
    try:
        if body.startswith(protobuf.MAGIC):
            return protobuf.decode(body)
        return yaml.load(body, yaml.CSafeLoader) if body[:1] not in b"{[" else json.loads(body)
    except protobuf.UnknownMessage as unknown:
        raise Refused(415, "UnsupportedMediaType", str(unknown)) from None
    except (ValueError, yaml.YAMLError) as error:
        raise bad_request(f"the body of the request is not readable: {error}") from None


def body_of(request: Request) -> Object:
    value = parsed(request.body)
    if not isinstance(value, dict):
        raise bad_request("the body of the request is no object")
    return value


def metadata_of(target: Target, value: Object) -> Object:
    """The metadata of an object that a client sent, when it is what its path says. Raises Refused."""
    kind = target.kind
    found = (value.setdefault("apiVersion", kind.api_version), value.setdefault("kind", kind.name))
    if found != (kind.api_version, kind.name):
        raise bad_request(f"the object provided is unrecognized: {found} where {kind.api_version} {kind.name} belongs")
    metadata = value.setdefault("metadata", {})
    if not isinstance(metadata, dict):
        raise bad_request("metadata must be an object")
    wanted = {"namespace": target.namespace} if kind.namespaced else {}
    wanted |= {"name": target.name} if target.name else {}
    for name, part in wanted.items():
        given = metadata.get(name) or part
        if given != part:
            raise bad_request(f"the {name} of the object ({given}) does not match the {name} on the URL ({part})")
        metadata[name] = part
    return metadata


def selection(request: Request) -> Callable[[Object], bool]:
    """Raises Refused: a selector that cannot be read."""
    by_label, by_field = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")

    def matches(value: Object) -> bool:
        return labels_match(by_label, value["metadata"].get("labels") or {}) and fields_match(by_field, value)

    try:
        matches({"metadata": {}})
    except ValueError as error:
        raise bad_request(str(error)) from None
    return matches


def selected_name(field_selector: str) -> str:
    """The one name that a list or watch is limited to."""
    terms = [term.split("=")[-1] for term in field_selector.split(",") if term.startswith("metadata.name=")]
    return terms[0] if terms else ""
