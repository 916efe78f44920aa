"""The models that a router serves, by the names that clients use.

Several releases may have one name. Their shares divide its sessions: weighted rendezvous hashing gives each session the
release with the largest share / -ln(draw), where the draw, between 0 and 1, is a hash of the session and the release
(Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", 2005, logarithmic method). So a session stays with its
release, and a changed share moves as few sessions as possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import xxhash

from baton.api import ModelCard
from baton.errors import InvalidRequest
from router.admission import model_not_found
from router.admission.tenants import Tenant
from router.request.resume import CallsInFlight
from router.service import Front, RouterService
from router.timeline.log import RequestLog

Opening = Callable[[], str]
"""Returns the identity of a session within its tenant: the client's name for it, or the start of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A model in the table. Several releases may have the same name."""

    content_id: str
    name: str
    release: str
    share: float
    service: RouterService


class ModelTable:
    """Table of the served models.

    Args:
        front: the dependencies that all models share.
        default_model: name of the model that serves requests without a name; empty: the only one.
    """

    def __init__(self, front: Front, default_model: str = "") -> None:
        self._front = front
        self._default = default_model
        self._releases: dict[str, Release] = {}
        """Releases by content id."""
        self._by_name: dict[str, tuple[Release, ...]] = {}
        self._version = 0

    # -- content -------------------------------------------------------------------------------------------------------

    def put(self, release: Release) -> None:
        """Add a release, or replace the one of its content id."""
        if self._releases.get(release.content_id) != release:
            self._releases[release.content_id] = release
            self._index()

    def drop(self, content_id: str) -> None:
        """Remove a release: requests for it are refused from now on, and running ones continue. Idempotent."""
        if self._releases.pop(content_id, None) is not None:
            self._index()

    def _index(self) -> None:
        by_name: dict[str, list[Release]] = {}
        for release in sorted(self._releases.values(), key=lambda each: (-each.share, each.content_id)):
            by_name.setdefault(release.name, []).append(release)
        self._by_name = {name: tuple(releases) for name, releases in by_name.items()}
        self._version += 1

    @property
    def releases(self) -> Sequence[Release]:
        """All releases."""
        return tuple(self._releases.values())

    # -- what all models share -----------------------------------------------------------------------------------------

    @property
    def requests(self) -> RequestLog:
        """The log of requests of all models."""
        return self._front.requests

    @property
    def calls(self) -> CallsInFlight:
        """The running calls of all models."""
        return self._front.calls

    def stop_requests(self) -> None:
        """End all requests with RouterStopping, and further ones at once: the router stops."""
        self._front.calls.stop()
        for each in self._releases.values():
            each.service.stop_held()

    def is_crowded(self) -> bool:
        """Return whether the router is at capacity: requests are refused, or wait long for a worker of their model."""
        return self._front.limiter.is_crowded or any(each.service.is_crowded for each in self._releases.values())

    @property
    def in_flight(self) -> tuple[int, int]:
        """Number of choices that are being generated, and the limit."""
        return self._front.limiter.num_in_flight, self._front.limiter.max_in_flight

    # -- names ---------------------------------------------------------------------------------------------------------

    def service(self, name: str, tenant: Tenant, opening: Opening) -> RouterService:
        """Return the service of the release that serves a request; see `release`."""
        return self.release(name, tenant, opening).service

    def release(self, name: str, tenant: Tenant, opening: Opening) -> Release:
        """Return the release that serves a request.

        Args:
            name: model that the client requests; empty: it names none.
            opening: the session of the request; called only if several releases have the name.

        Raises:
            ModelNotFound: the tenant may not use a model or an adapter of this name, or there is none.
            InvalidRequest: the client names no model, and there are several.
        """
        releases = self._of(name, tenant)
        if len(releases) == 1:
            return releases[0]
        session = f"{tenant.id}\0{opening()}".encode("utf-8", "surrogatepass")
        return max(releases, key=lambda each: _rank(each, session))

    def name_for(self, name: str, tenant: Tenant) -> str:
        """Return the name of the model or adapter that a client requests, for records; empty: it is not known.

        Other names are not recorded, because clients may send any.
        """
        try:
            releases = self._of(name, tenant)
        except InvalidRequest:
            return ""
        return name or releases[0].name

    def _of(self, name: str, tenant: Tenant) -> tuple[Release, ...]:
        """Return the releases that may serve a request, with shares above 0 unless all are 0; see `release`."""
        if not name:
            return self._unnamed(tenant)
        if tenant.may_use(name):
            if (found := self._by_name.get(name)) is not None:
                return _with_shares(found)
            holders = tuple(each for each in self._releases.values() if name in each.service.adapters)
            if holders:
                return _with_shares(holders)
        raise model_not_found(name, tuple(self._names(tenant)))

    def _unnamed(self, tenant: Tenant) -> tuple[Release, ...]:
        if self._default and tenant.may_use(self._default):
            if (found := self._by_name.get(self._default)) is None:  # also if it is an adapter: a request must name it
                raise model_not_found(self._default, tuple(self._names(tenant)))
            return _with_shares(found)
        usable = [name for name in self._by_name if tenant.may_use(name)]
        if len(usable) == 1:
            return _with_shares(self._by_name[usable[0]])
        if not usable:
            raise model_not_found("", ())
        raise InvalidRequest(
            f"model is missing, and several models are served: {', '.join(sorted(usable)[:8])}; name one", "model"
        )

    def _names(self, tenant: Tenant) -> Iterator[str]:
        """Yield the names that the tenant may request."""
        yield from filter(tenant.may_use, self._by_name)
        for each in self._releases.values():
            yield from filter(tenant.may_use, each.service.adapters)

    # -- cards ---------------------------------------------------------------------------------------------------------

    def card(self, name: str, tenant: Tenant) -> ModelCard:
        """Return the card of a model or an adapter. Raises ModelNotFound: see `release`."""
        return _card(self._of(name, tenant), name)

    def cards(self, tenant: Tenant) -> list[ModelCard]:
        """Return the cards of the models that the tenant may use, each followed by its adapters, ordered by name."""
        cards = []
        for name in sorted(self._by_name):
            releases = self._by_name[name]
            if tenant.may_use(name):
                cards.append(_card(_with_shares(releases), name))
            adapters = sorted({each for release in releases for each in release.service.adapters})
            cards += [self.card(each, tenant) for each in adapters if tenant.may_use(each)]
        return cards

    @property
    def version(self) -> tuple[object, ...]:
        """Value that differs, by `==`, after every change of `cards`."""
        services = [each.service for each in self._releases.values()]
        limits = tuple(each.facts.max_model_len for each in services)
        return self._version, limits, _Identities(each.adapters for each in services)


class _Identities:
    """Objects that are compared by identity, and kept alive for that."""

    def __init__(self, objects: Iterable[object]) -> None:
        self._objects = tuple(objects)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identities) or len(self._objects) != len(other._objects):
            return False
        return all(mine is theirs for mine, theirs in zip(self._objects, other._objects, strict=True))

    __hash__ = None  # type: ignore[assignment]


def _with_shares(releases: tuple[Release, ...]) -> tuple[Release, ...]:
    """Return the releases that get sessions; all of them if no share is above 0."""
    if len(releases) == 1:
        return releases
    return tuple(each for each in releases if each.share > 0) or releases


def _rank(release: Release, session: bytes) -> tuple[float, str]:
    draw = (xxhash.xxh64_intdigest(session + b"\0" + release.content_id.encode()) + 0.5) / 2**64
    return (release.share or 1.0) / -math.log(min(draw, 1 - 2**-53)), release.content_id


def _card(releases: Sequence[Release], name: str) -> ModelCard:
    """Return the card of a name: its first release's, with the shortest context window of all of them."""
    cards = [each.service.card_of(name) for each in releases]
    return replace(cards[0], max_model_len=min(each.max_model_len for each in cards))
