"""A container's environment variables, out of its pod and the objects it names."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

from tests.fakekube.machine.objects import CONFIG_MAP, SECRET, annotations_of, labels_of, quantity
from tests.fakekube.machine.translate import expand
from tests.fakekube.store import Missing, Object, Resource

Lookup = Callable[[Resource, str], Object]
"""An object of the pod's namespace, by name. Raises Missing."""


class NotYet(Exception):
    """A container cannot start now; it may later."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def variables(container: Object, pod: Object, lookup: Lookup) -> dict[str, str]:
    """`envFrom`, then `env`, with `$(NAME)` of what came before; nothing translated.

    Raises:
        NotYet: an object that is not optional is missing, or a key of it.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        found |= {source.get("prefix", "") + name: value for name, value in _all_of(source, lookup).items()}
    for variable in container.get("env") or []:
        if "valueFrom" not in variable:
            found[variable["name"]] = expand(variable.get("value", ""), found)
        elif (value := _value_from(variable["valueFrom"], container, pod, lookup)) is not None:
            found[variable["name"]] = value
    return found


def contents(resource: Resource, value: Object) -> dict[str, bytes]:
    """The entries of a ConfigMap or a Secret."""
    plain = {name: text.encode() for name, text in (value.get("data") or {}).items()}
    if resource == SECRET:
        return {name: base64.b64decode(text) for name, text in plain.items()}
    return plain | {name: base64.b64decode(text) for name, text in (value.get("binaryData") or {}).items()}


def field(pod: Object, path: str) -> str:
    """A fieldRef: metadata.name, metadata.labels['x'], status.podIP. metadata.labels alone are lines of x="..."."""
    named, _, rest = path.partition("[")
    tables = {"metadata.labels": labels_of(pod), "metadata.annotations": annotations_of(pod)}
    if named in tables:
        if rest:
            return tables[named].get(rest.strip("]'\""), "")
        return "\n".join(f'{name}="{value}"' for name, value in sorted(tables[named].items()))
    value: Any = pod
    for name in path.split("."):
        value = value.get(name, "") if isinstance(value, Mapping) else ""
    return str(value)


def resource(container: Object, reference: Object) -> str:
    """A resourceFieldRef, in units of its divisor, rounded up; the node's allocatable is not asked."""
    kind, _, name = reference["resource"].partition(".")
    value = ((container.get("resources") or {}).get(kind) or {}).get(name, 0)
    return str(math.ceil(quantity(value) / (quantity(reference.get("divisor") or 1) or 1)))


def _all_of(source: Object, lookup: Lookup) -> dict[str, str]:
    kind, reference = _reference(source, "configMapRef", "secretRef")
    try:
        return {name: value.decode() for name, value in contents(kind, lookup(kind, reference["name"])).items()}
    except Missing as error:
        if reference.get("optional"):
            return {}
        raise NotYet("CreateContainerConfigError", str(error)) from None


def _value_from(source: Object, container: Object, pod: Object, lookup: Lookup) -> str | None:
    """None: there is no such variable then."""
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource(container, source["resourceFieldRef"])
    kind, reference = _reference(source, "configMapKeyRef", "secretKeyRef")
    try:
        return contents(kind, lookup(kind, reference["name"]))[reference["key"]].decode()
    except (Missing, KeyError):
        if reference.get("optional"):
            return None
        message = f"couldn't find key {reference['key']} in {kind.plural} {reference['name']}"
        raise NotYet("CreateContainerConfigError", message) from None


def _reference(source: Object, config_map: str, secret: str) -> tuple[Resource, Object]:
    return (CONFIG_MAP, source[config_map]) if config_map in source else (SECRET, source[secret])
