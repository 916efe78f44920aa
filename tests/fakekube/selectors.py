"""Label and field selectors, as they stand in a query."""

from __future__ import annotations

import re

from tests.fakekube.fields import at
from tests.fakekube.store import Object

SET = re.compile(r"(?P<key>[^\s!=,()]+)\s+(?P<how>in|notin)\s*\((?P<values>[^)]*)\)")
EQUAL = re.compile(r"(?P<key>[^\s!=,()]+)\s*(?P<how>==|=|!=)\s*(?P<value>[^\s,()]*)")
PRESENT = re.compile(r"(?P<absent>!?)\s*(?P<key>[^\s!=,()]+)")


def labels_match(selector: str, labels: dict[str, str]) -> bool:
    """Raises ValueError: it is no label selector."""
    return all(_holds(term, labels) for term in re.split(r",(?![^(]*\))", selector) if term.strip())


def fields_match(selector: str, value: Object) -> bool:
    """Raises ValueError: it is no field selector."""
    for term in filter(None, selector.split(",")):
        parts = EQUAL.fullmatch(term.strip())
        if parts is None:
            raise ValueError(f"invalid field selector: {term!r}")
        found = at(value, parts["key"])
        if (("" if found is None else str(found)) == parts["value"]) == (parts["how"] == "!="):
            return False
    return True


def selector_matches(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a LabelSelector, as it stands in objects, is met."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_meets(one, labels) for one in selector.get("matchExpressions") or ())


def selector_text(selector: Object | str) -> str:
    """A LabelSelector as a query has it."""
    if isinstance(selector, str):
        return selector
    terms = [f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items())]
    for one in selector.get("matchExpressions") or ():
        key, how = one["key"], one["operator"]
        if how in ("In", "NotIn"):
            terms.append(f"{key} {how.lower()} ({','.join(one['values'])})")
        else:
            terms.append(key if how == "Exists" else f"!{key}")
    return ",".join(terms)


def _meets(one: Object, labels: dict[str, str]) -> bool:
    present, found = one["key"] in labels, labels.get(one["key"])
    how = one["operator"]
    if how in ("In", "NotIn"):
        return bool(found in one["values"]) == bool(how == "In")
    return present == bool(how == "Exists")


def _holds(term: str, labels: dict[str, str]) -> bool:
    term = term.strip()
    if parts := SET.fullmatch(term):
        values = [value.strip() for value in parts["values"].split(",")]
        return (labels.get(parts["key"]) in values) == (parts["how"] == "in")
    if parts := EQUAL.fullmatch(term):
        return (labels.get(parts["key"]) == parts["value"]) == (parts["how"] != "!=")
    if parts := PRESENT.fullmatch(term):
        return (parts["key"] in labels) != bool(parts["absent"])
    raise ValueError(f"unable to parse requirement: {term!r}")
