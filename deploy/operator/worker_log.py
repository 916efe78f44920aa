"""Log of a worker, which the router serves, and detection of its new lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from baton.errors import NoWorker
from deploy.operator.client import Access, Client
from deploy.operator.http_client import HttpClient
from deploy.operator.scrape import seen_from

TIMEOUT_S = 10.0
POLL_S = 1.0


def endpoints(client: Client, address: str, access: Access) -> list[HttpClient]:
    """Return clients of the HTTP ports at which the routers may answer, the likeliest first.

    Args:
        client: client of the routers' gRPC ports.
        address: address of a gRPC port.
        access: credentials of this client.

    Raises:
        BatonError: as for `Client.status`.
    """
    scheme = "https" if access.tls else "http"
    addresses = [each for router in client.status()["routers"] for each in seen_from(router["http"], address)]
    return [HttpClient(f"{scheme}://{each}", access, TIMEOUT_S) for each in addresses]


def read(endpoints: Sequence[HttpClient], worker_id: str, model: str = "") -> list[str]:
    """Return the latest log lines of a worker.

    Args:
        model: the worker's model, if the cluster serves several; empty: the only one.

    Raises:
        NoWorker: no router answers. Others are the router's own.
    """
    failure = NoWorker("no router is known")
    query = f"?model={quote(model, safe='')}" if model else ""
    for endpoint in endpoints:
        try:
            return [str(line) for line in endpoint.get(f"/api/workers/{quote(worker_id, safe='')}/log{query}")["lines"]]
        except NoWorker as error:
            failure = error
    raise failure


def follow(endpoints: Sequence[HttpClient], worker_id: str, shown: Sequence[str], model: str = "") -> Iterator[str]:
    """Yield the new log lines of a worker until the caller stops. Raises the errors of `read`.

    Args:
        shown: lines that `read` returned before.
        model: see `read`.
    """
    while True:
        time.sleep(POLL_S)
        lines = read(endpoints, worker_id, model)
        yield from new_lines(shown, lines)
        shown = lines


def new_lines(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the lines of `now` that are newer than `before`. Both are tails of one log that only grows."""
    for number in range(min(len(before), len(now)), 0, -1):
        if list(before[-number:]) == list(now[:number]):
            return list(now[number:])
    return list(now)
