"""What becomes of an object on its way into the store: pruned, defaulted, checked."""

from __future__ import annotations

import base64
import copy
import json
import logging
import re
from typing import Any

from jsonschema import ValidationError

from tests.fakekube import cel, defaults, rules
from tests.fakekube.kinds import CRDS, NAMESPACES, PODS, Kind
from tests.fakekube.status import Cause, bad_request, invalid
from tests.fakekube.store import Object, Resource, now

logger = logging.getLogger(__name__)
GO_TYPES = {dict: "object", list: "array", str: "string", bool: "bool", int: "number", float: "number"}


def decode(kind: Kind, value: Object, field_validation: str) -> list[str]:
    """Prunes and defaults an object in place, as reading it does. Returns warnings.

    Args:
        field_validation: of unknown fields. Strict refuses them, Warn warns, Ignore does neither.

    Raises:
        Refused.
    """
    if not kind.custom:
        _strip_nulls(value)
        _string_data(value)
    unknown = kind.schema.prune(value)
    said = [f'unknown field "{path}"' for path in unknown]
    if unknown and field_validation == "Strict":
        raise bad_request(f"{_unreadable(kind)}strict decoding error: {', '.join(said)}")
    if not kind.custom:
        for error in kind.schema.errors(value):
            if error.validator != "required":
                raise bad_request(f"{_unreadable(kind)}{_mismatch(error)}")
    return said if field_validation == "Warn" else []


def check(kind: Kind, value: Object, old: Object | None) -> None:
    """Fills in defaults and raises Refused unless the object may be stored in the place of the old one."""
    name = value["metadata"].get("name", "")
    if kind.custom:
        kind.schema.fill(value)
    elif "spec" in kind.schema.node["properties"]:
        value.setdefault("spec", {})
    causes = [_cause(error) for error in kind.schema.errors(value)]
    if causes:  # the rules below are for objects of the right shape
        raise invalid(kind, name, causes)
    if kind.custom:
        causes = [
            ("FieldValueInvalid", f"Invalid value: {said}", path) for path, said in _broken_rules(kind, value, old)
        ]
    else:
        defaults.fill(value)
    causes += rules.broken(kind, value) + (rules.changed(kind, old, value) if old is not None else [])
    if causes:
        raise invalid(kind, name, causes)


def allowed_part(kind: Kind, subresource: str, live: Object, new: Object) -> Object:
    """What a write to this subresource, or to the object itself, may change."""
    if subresource == "status":
        changed = copy.deepcopy(live)
        for name in ("resourceVersion", "managedFields"):
            if name in new["metadata"]:
                changed["metadata"][name] = new["metadata"][name]
        return changed | ({"status": new["status"]} if "status" in new else {})
    if kind.status:
        new = {name: part for name, part in new.items() if name != "status"}
        if "status" in live:
            new["status"] = live["status"]
    if kind.resource == Resource("", "services"):
        for name in ("clusterIP", "clusterIPs"):
            if name in live["spec"] and not new.get("spec", {}).get(name):
                new.setdefault("spec", {})[name] = live["spec"][name]
    return new


def first_status(kind: Kind, value: Object) -> Object:
    """Of a new object."""
    if kind.resource == NAMESPACES:
        return {"phase": "Active"}
    if kind.resource == PODS or kind.name == "PersistentVolumeClaim":
        return {"phase": "Pending"}
    if kind.resource != CRDS:
        return {}
    spec = value["spec"]
    conditions = [
        {"type": name, "status": "True", "lastTransitionTime": now(), "reason": reason, "message": ""}
        for name, reason in (("NamesAccepted", "NoConflicts"), ("Established", "InitialNamesAccepted"))
    ]
    stored = [version["name"] for version in spec["versions"] if version["storage"]]
    return {"conditions": conditions, "acceptedNames": spec["names"], "storedVersions": stored}


def _broken_rules(kind: Kind, value: Object, old: Object | None) -> list[tuple[str, str]]:
    try:
        return list(cel.broken(kind.schema, value, old))
    except cel.Unknown as unknown:
        logger.warning("the rules of %s are not looked at: %s", kind.qualified_plural, unknown)
        return []


def _unreadable(kind: Kind) -> str:
    return f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}: '


def _mismatch(error: ValidationError) -> str:
    wanted = error.schema.get("type", "another type") if isinstance(error.schema, dict) else "another type"
    wanted = wanted if isinstance(wanted, str) else wanted[0]
    found = GO_TYPES.get(type(error.instance), "null")
    return f"json: cannot unmarshal {found} into Go struct field {_path(error)} of type {wanted}"


def _cause(error: ValidationError) -> Cause:
    path, value = _path(error), error.instance
    if error.validator == "required":
        missing = re.match(r"'(.*)' is a required property", error.message)
        assert missing is not None
        return ("FieldValueRequired", "Required value", f"{path}.{missing[1]}".lstrip("."))
    if error.validator == "enum":
        values: Any = error.validator_value
        supported = ", ".join(json.dumps(one) for one in values if one is not None)
        said = f"Unsupported value: {json.dumps(value)}: supported values: {supported}"
        return ("FieldValueNotSupported", said, path)
    if error.validator == "type":
        types: Any = error.validator_value
        wanted = [name for name in types if name != "null"]
        said = f"Invalid value: {json.dumps(GO_TYPES.get(type(value), 'null'))}: {path} in body must be of type "
        return ("FieldValueTypeInvalid", f"{said}{' or '.join(wanted)}: {json.dumps(value)}", path)
    if error.validator in ("minimum", "maximum"):
        bound = "greater" if error.validator == "minimum" else "less"
        said = f"{path} in body should be {bound} than or equal to {error.validator_value}"
        return ("FieldValueInvalid", f"Invalid value: {json.dumps(value)}: {said}", path)
    return ("FieldValueInvalid", f"Invalid value: {json.dumps(value)}: {path} in body: {error.message}", path)


def _path(error: ValidationError) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.absolute_path).lstrip(".")


def _strip_nulls(value: Any) -> None:
    """Go reads a null as a field that was left out."""
    if isinstance(value, dict):
        for name in [name for name, part in value.items() if part is None]:
            del value[name]
        for part in value.values():
            _strip_nulls(part)
    elif isinstance(value, list):
        for item in value:
            _strip_nulls(item)


def _string_data(value: Object) -> None:
    if value.get("kind") == "Secret" and isinstance(value.get("stringData"), dict):
        plain = value.pop("stringData")
        encoded = {key: base64.b64encode(str(text).encode()).decode() for key, text in plain.items()}
        value["data"] = (value.get("data") or {}) | encoded
