"""HTTP client of a router, for the commands of the CLI: JSON documents and streamed events."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from baton.errors import BatonError, Forbidden, InvalidRequest, NoWorker, Unauthenticated
from baton.tls import client_tls
from deploy.operator.client import Access, metadata_of
from deploy.operator.scrape import http_connection

BY_STATUS: Mapping[int, type[BatonError]] = {
    kind.http: kind for kind in (InvalidRequest, Unauthenticated, Forbidden, NoWorker)
}
DATA, END = "data:", "[DONE]"


def is_url(address: str) -> bool:
    """Return True if an address is the URL of an HTTP port: http://HOST:PORT or https://HOST:PORT."""
    return address.startswith(("http://", "https://"))


class HttpClient:
    """Client of one router's HTTP port.

    Args:
        url: http://HOST:PORT or https://HOST:PORT.
        access: credentials of this client.
        timeout_s: maximum wait for the next byte.

    Raises:
        InvalidRequest: the URL has another form.
    """

    def __init__(self, url: str, access: Access, timeout_s: float) -> None:
        parts = urlsplit(url)
        if not is_url(url) or parts.path.strip("/") or not parts.hostname:
            raise InvalidRequest(f"{url!r} is not http://HOST:PORT or https://HOST:PORT", "address")
        self._url, self._timeout_s = url, timeout_s
        self._address = parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"
        self._headers = dict(metadata_of(access.api_key))
        self._tls = None
        if parts.scheme == "https":
            self._tls = access.tls or client_tls(is_on=True, ca="", certificate="", key="")

    def get(self, path: str) -> Any:
        """Return the JSON document at a path. Raises the router's own errors, or NoWorker if none answers."""
        with self._answer("GET", path, None) as answer:
            return json.loads(answer.read())

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed response. Raises the router's own errors, or NoWorker if none answers."""
        with self._answer("POST", path, json.dumps(body).encode()) as answer:
            for line in answer:
                text = line.decode().strip()
                if not text.startswith(DATA) or (data := text.removeprefix(DATA).strip()) == END:
                    continue
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise BatonError(str(event["error"].get("message", event["error"])))
                yield event

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        try:
            with contextlib.closing(http_connection(self._address, self._timeout_s, self._tls)) as connection:
                headers = self._headers | ({"content-type": "application/json"} if body else {})
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                if answer.status != http.client.OK:
                    raise _error(answer.status, answer.read())
                yield answer
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NoWorker(f"no router answers at {self._url} ({error or type(error).__name__})") from None


def _error(status: int, body: bytes) -> BatonError:
    """Return the router's own error, from its JSON."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP status {status}"
    return BY_STATUS.get(status, BatonError)(message)
