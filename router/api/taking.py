"""Records ignored fields and refusals of bodies, which happen before the service sees a request."""

from __future__ import annotations

import re
import time
from typing import Self

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from baton.errors import BatonError, InvalidRequest, UnknownField, Unsupported
from router.api.exchange import id_of, ignored_of
from router.api.fields import LEFT_OUT, UNSUPPORTED
from router.service import RouterService
from router.timeline.log import RefusedBody

OTHER = "other"
"""Metric label for field names that no API declares, because clients may send any name."""
_PLACE = re.compile(r"\[\d+\]")


class Taking:
    """Context manager around reading a body and building its request. It is the only place that records their refusal.

    Args:
        operation: the operation, named as in the accounting of served requests.
    """

    __slots__ = ("_arrived_s", "_operation", "_request", "_service")

    def __init__(self, service: RouterService, request: Request, operation: str) -> None:
        self._service = service
        self._request = request
        self._operation = operation

    def __enter__(self) -> Self:
        self._arrived_s = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        match error:
            case None:
                if names := ignored_of(self._request).names:
                    self._service.requests.ignored(map(self._label, names))
            case RequestValidationError():
                self._refused(refusal_of(error))
            case BatonError() | HTTPException():
                self._refused(error)

    def _refused(self, error: BatonError | HTTPException) -> None:
        param = error.param if isinstance(error, (InvalidRequest, Unsupported)) else None
        refused = RefusedBody(
            request_id=id_of(self._request),
            tenant=self._request.state.tenant.id,
            operation=self._operation,
            arrived_s=self._arrived_s,
            error=error,
            field=self._label(param) if param else "",
        )
        self._service.requests.refused(refused)

    def _label(self, name: str) -> str:
        """Return the name of a field without its path, or `other` if no API declares it."""
        own = _PLACE.sub("", name).rpartition(".")[2]
        return own if own in self._request.app.state.field_names else OTHER


def refusal_of(error: RequestValidationError) -> InvalidRequest | Unsupported:
    """Return the refusal of an invalid body; `param` is the path of its first invalid field."""
    first = error.errors()[0]
    where = first["loc"][first["loc"][:1] == ("body",) :]
    param = ""
    for part in where:
        param += f"[{part}]" if param and isinstance(part, int) else f"{'.' if param else ''}{part}"
    if first.get("type") in (UNSUPPORTED, LEFT_OUT):
        return Unsupported(f"{param} {first['msg']}", param)
    if first.get("type") == "extra_forbidden":
        return UnknownField(f"{param}: unknown field; remove it or correct its name", param)
    return InvalidRequest(f"{param or 'the body'}: {first['msg']}", param or None)
