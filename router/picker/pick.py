"""Chooses the routers that may serve a gateway's request, and their order. Pure: no calls, no clock.

Every router can serve every model of its endpoint, so the choice affects two things only: a conversation that stays at
one router resumes broken streams there without Redis, and no router should be much busier than others. Rendezvous
hashing gives a session an order of all routers that hardly changes when routers come and go (Thaler and Ravishankar,
"Using name-based mappings to increase hit rates", 1998). The session's request goes to the first router of its order
unless the second one is much less loaded: with two choices, the load of the busiest router is close to the average
(Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
"""

from __future__ import annotations

import functools
import ipaddress
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import xxhash

from baton.addresses import address_of, is_address
from baton.cluster import RouterInfo

MAX_ENDPOINTS = 8
"""Maximum number of endpoints of an answer: the first one and those for retries."""
BUSIER, SLACK = 1.25, 4.0
"""The second router serves a session if the load of the first one is more than BUSIER times that of the second, plus
SLACK requests. Announced loads are up to a second old, so a smaller difference says little."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Properties of a request that decide which routers should serve it."""

    session: bytes
    """Identity of its conversation; requests of one session prefer the same router."""
    content_ids: frozenset[str] = frozenset()
    """Content ids of the models that may serve it; empty: not known."""


@dataclass(frozen=True, slots=True)
class Subset:
    """Endpoints to which a gateway limits the choice."""

    endpoints: frozenset[str]
    """Endpoints as IP:port."""
    hosts: frozenset[str] = frozenset()
    """IP addresses, each with all of its ports."""

    @staticmethod
    def of(entries: Iterable[str]) -> Subset:
        """Read a gateway's list. An entry is an IP address with or without a port; other entries match no router."""
        endpoints, hosts = set(), set()
        for entry in entries:
            if (endpoint := endpoint_of(entry)) is not None:
                endpoints.add(endpoint)
            elif (host := _host(entry)) is not None:
                hosts.add(host)
        return Subset(frozenset(endpoints), frozenset(hosts))

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self.endpoints or endpoint.rpartition(":")[0].strip("[]") in self.hosts


@dataclass(slots=True)
class _Endpoint:
    """An address, with the loads that its routers announce. Routers of one machine may share an address."""

    address: str
    loads: list[int]
    serves: bool = False
    """True if a router there serves a wanted model."""
    is_ready: bool = False
    """True if a router there knows ready workers of a wanted model."""

    @property
    def load(self) -> float:
        return sum(self.loads) / len(self.loads)


def choose(
    routers: Iterable[RouterInfo], wanted: Wanted, subset: Subset | None = None, failing: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the endpoints (IP:port) to try, in order; empty: no router of the subset has an IP address.

    Routers that know ready workers of the model are preferred, then those that serve it: they hold the request until
    the model is awake, or until a worker is ready. If no router is known to serve it, all of them may be tried.

    Args:
        subset: the endpoints that may be chosen; None: all.
        failing: endpoints that have recently failed to serve a request; they come last.
    """
    found = [each for each in _endpoints(routers, wanted.content_ids) if subset is None or each.address in subset]
    found = [each for each in found if each.is_ready] or [each for each in found if each.serves] or found
    found.sort(key=lambda each: (each.address not in failing, _rank(wanted.session, each.address)), reverse=True)
    has_choice = len(found) > 1 and found[1].address not in failing
    if has_choice and found[0].load > BUSIER * found[1].load + SLACK:
        found[:2] = found[1], found[0]
    return tuple(each.address for each in found[:MAX_ENDPOINTS])


@functools.lru_cache(maxsize=4096)
def endpoint_of(address: str) -> str | None:
    """Return IP:port in canonical form; None: it has another form, or no client can connect to the IP address."""
    if not is_address(address := address.strip()):
        return None
    host, _, port = address.rpartition(":")
    ip = _host(host.strip("[]"))
    is_plain = ip is not None and (":" in ip) == host.startswith("[")
    return address_of(ip, int(port)) if ip is not None and is_plain else None


def _host(text: str) -> str | None:
    """Return an IP address in canonical form; None: it is no IP address, or no client can connect to it."""
    try:
        found = ipaddress.ip_address(text.strip())
    except ValueError:
        return None
    has_scope = isinstance(found, ipaddress.IPv6Address) and found.scope_id is not None
    return None if has_scope or found.is_unspecified else found.compressed


def _endpoints(routers: Iterable[RouterInfo], content_ids: Collection[str]) -> Sequence[_Endpoint]:
    at: dict[str, list[RouterInfo]] = defaultdict(list)
    for router in routers:
        if (address := endpoint_of(router.http)) is not None:
            at[address].append(router)
    return [_endpoint(address, those, content_ids) for address, those in at.items()]


def _endpoint(address: str, routers: Sequence[RouterInfo], content_ids: Collection[str]) -> _Endpoint:
    endpoint = _Endpoint(address, [sum(each.in_flight - each.held for each in router.models) for router in routers])
    for router in routers:
        if not router.models:  # a release that serves one model, and does not announce its content id
            endpoint.serves, endpoint.is_ready = True, endpoint.is_ready or router.ready_workers > 0
        for model in router.models:
            if not content_ids or model.content_id in content_ids:
                endpoint.serves, endpoint.is_ready = True, endpoint.is_ready or model.ready_workers > 0
    return endpoint


def _rank(session: bytes, address: str) -> tuple[int, str]:
    return xxhash.xxh64_intdigest(session + b"\0" + address.encode()), address
