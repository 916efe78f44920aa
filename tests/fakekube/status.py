"""What the API server answers when it refuses: the `Status` object of Kubernetes."""

from __future__ import annotations

from tests.fakekube.kinds import Kind
from tests.fakekube.store import Object

Cause = tuple[str, str, str]
"""Reason, message and field."""


class Refused(Exception):
    """A request the API server turns down, with the HTTP code, reason and words of the real one."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.details = details or {}

    def status(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def bad_request(message: str) -> Refused:
    return Refused(400, "BadRequest", message)


def not_found(kind: Kind, name: str) -> Refused:
    return Refused(404, "NotFound", f'{kind.qualified_plural} "{name}" not found', _details(kind, name))


def already_exists(kind: Kind, name: str) -> Refused:
    return Refused(409, "AlreadyExists", f'{kind.qualified_plural} "{name}" already exists', _details(kind, name))


def conflict(kind: Kind, name: str, why: str, causes: list[Cause] | None = None) -> Refused:
    return Refused(409, "Conflict", why, _details(kind, name, causes))


def stale(kind: Kind, name: str) -> Refused:
    why = "the object has been modified; please apply your changes to the latest version and try again"
    return conflict(kind, name, f'Operation cannot be fulfilled on {kind.qualified_plural} "{name}": {why}')


def invalid(kind: Kind, name: str, causes: list[Cause]) -> Refused:
    """`causes` must not be empty."""
    errors = [f"{field}: {message}" for _, message, field in causes]
    said = errors[0] if len(errors) == 1 else f"[{', '.join(errors)}]"
    title = f"{kind.name}.{kind.resource.group}" if kind.resource.group else kind.name
    return Refused(422, "Invalid", f'{title} "{name}" is invalid: {said}', _details(kind, name, causes, kind.name))


def _details(kind: Kind, name: str, causes: list[Cause] | None = None, named: str | None = None) -> Object:
    details: Object = {"name": name, "group": kind.resource.group, "kind": named or kind.resource.plural}
    if causes:
        details["causes"] = [
            {"reason": reason, "message": message, "field": field} for reason, message, field in causes
        ]
    return details
