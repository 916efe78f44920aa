"""Images of requests: workers look at them before the prompt is placed, and keep their pixels for a while.

A worker says which tokens take the place of an image. The router remembers the answers, so an image that comes again,
as in every further turn of a chat, costs no call. Requests with the same first image ask the same worker, as long as it
is there and not much busier than the others. Placement prefers a worker that has looked at an image, because another
one needs its bytes and has to decode it again.

The router keeps the bytes of images only while their request runs. What it remembers of an image has no bytes, and is
kept by cache scope: no tenant can find out by the time of a request whether another one has sent an image.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import xxhash

from baton.blocks import KEY_BYTES
from baton.cluster import Role, Worker
from baton.config import RouterConfig
from baton.errors import BatonError, InvalidRequest, NoWorker, Unsupported, WorkerFailed
from baton.images import image_digest
from baton.messages import SeenImage, SequenceSpec
from baton.turns import Turns
from router.admission.tenants import Tenant
from router.dispatch.worker_client import WorkerCallError, WorkerClient
from router.placement import ImageCosts, Mode
from router.placement.pool_view import PoolView

MAX_KEPT, MAX_KEPT_TOKENS = 4096, 2**20
"""Maximum number of images that a router remembers, and of their tokens together: about 16 MiB."""
MAX_HOLDERS = 4
"""Maximum number of workers that are remembered to hold an image."""
NUM_LOOKING, MAX_WAITING_BYTES = 8, 64 * 2**20
"""Maximum number of requests whose images are looked at, and of the bytes of those that wait."""
BUSY_S = 2.0
"""A worker whose prompts take this much longer than those of the least busy one is passed over."""
LEAST_LOOK_S = 0.02
"""Least cost of looking at an image again on another worker."""
MAX_INLINE_BYTES = 2**18
"""Images of more bytes are hashed in a thread."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sighting:
    """A worker's answer about an image, and where its pixels are."""

    seen: SeenImage
    look_s: float
    """Time that the answer took: for the bytes to arrive, and to decode them."""
    holders: dict[tuple[str, int], None] = field(default_factory=dict)
    """Workers, by id and epoch, that have had the bytes; the latest is last."""

    def is_held_by(self, worker: Worker) -> bool:
        """Return whether a worker presumably holds the pixels."""
        return (worker.info.id, worker.info.epoch) in self.holders

    def note(self, worker: Worker) -> None:
        """Record that a worker gets the bytes."""
        holder = worker.info.id, worker.info.epoch
        self.holders.pop(holder, None)
        self.holders[holder] = None
        if len(self.holders) > MAX_HOLDERS:
            del self.holders[next(iter(self.holders))]

    def forget(self, worker: Worker) -> None:
        """Record that a worker does not hold the pixels."""
        self.holders.pop((worker.info.id, worker.info.epoch), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestImages:
    """Images of a running request; its choices share them."""

    encoded: tuple[bytes, ...] = field(repr=False)
    sightings: tuple[Sighting, ...]
    """One per image, in their order."""

    @property
    def seen(self) -> tuple[SeenImage, ...]:
        return tuple(sighting.seen for sighting in self.sightings)

    def costs(self, spec: SequenceSpec) -> ImageCosts:
        """Return what it costs to compute the sequence on a worker that does not hold its images."""
        saved: dict[str, float] = {}
        for sighting in set(self.sightings):
            for worker_id, _ in sighting.holders:
                saved[worker_id] = saved.get(worker_id, 0.0) + sighting.look_s
        total_s = sum(sighting.look_s for sighting in set(self.sightings))
        return ImageCosts(total_s=total_s, saved_s=saved, end=spec.images[-1].end)

    def lacking(self, worker: Worker, spec: SequenceSpec, num_cached_tokens: int) -> tuple[bytes, ...]:
        """Return the images whose pixels a worker needs and presumably lacks, and record that it gets them.

        Args:
            num_cached_tokens: leading tokens that it presumably caches, so that it computes none of their images.
        """
        needed = {
            sighting: image
            for sighting, image, placed in zip(self.sightings, self.encoded, spec.images, strict=True)
            if placed.end > num_cached_tokens and not sighting.is_held_by(worker)
        }
        for sighting in needed:
            sighting.note(worker)
        return tuple(needed.values())

    def all(self, worker: Worker) -> tuple[bytes, ...]:
        """Return all images, each once, and record that a worker gets them."""
        for sighting in self.sightings:
            sighting.note(worker)
        return tuple(dict(zip(self.sightings, self.encoded, strict=True)).values())

    def forget(self, worker: Worker) -> None:
        """Record that a worker lacks them."""
        for sighting in self.sightings:
            sighting.forget(worker)


class SeenBook:
    """What a router remembers of images, by cache scope and digest; the least recently used ones are forgotten."""

    def __init__(self, most: int = MAX_KEPT, most_tokens: int = MAX_KEPT_TOKENS) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._known: OrderedDict[tuple[str, bytes], Sighting] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, scope: str, digest: bytes) -> Sighting | None:
        """Return what is known of an image; None: nothing."""
        found = self._known.get((scope, digest))
        if found is not None:
            self._known.move_to_end((scope, digest))
        return found

    def add(self, scope: str, digest: bytes, sighting: Sighting) -> None:
        """Remember an image."""
        known = self._known.pop((scope, digest), None)
        self._num_tokens += len(sighting.seen.token_ids) - (len(known.seen.token_ids) if known else 0)
        self._known[scope, digest] = sighting
        while len(self._known) > self._most or self._num_tokens > self._most_tokens:
            _, forgotten = self._known.popitem(last=False)
            self._num_tokens -= len(forgotten.seen.token_ids)


class ImageLooker:
    """Has workers look at the images of one router's requests."""

    def __init__(self, *, pools: PoolView, client: WorkerClient, config: RouterConfig) -> None:
        self._pools = pools
        self._client = client
        self._config = config
        self._book = SeenBook()
        self._turns = Turns(NUM_LOOKING, MAX_WAITING_BYTES)

    async def placeholder(self) -> int:
        """Return the token that stands for an image in a rendered chat.

        Raises:
            Unsupported: no worker takes images.
            NoWorker: there are no workers.
        """
        until_s = time.monotonic() + self._config.worker_wait_s
        while (found := self._pools.image_placeholder) is None:
            if self._pools.workers:
                raise Unsupported("this model takes no images; send text only", "messages")
            await self._wait(until_s)
        return found

    async def look(self, images: Sequence[bytes], tenant: Tenant) -> RequestImages:
        """Return what workers see of images.

        Raises:
            InvalidRequest, Unsupported: a worker refuses an image.
            Overloaded: too many images wait to be looked at.
            NoWorker, WorkerFailed: no worker can look at them.
        """
        num_bytes = sum(map(len, images))
        digests = _digests(images) if num_bytes <= MAX_INLINE_BYTES else await asyncio.to_thread(_digests, images)
        by_digest = dict(zip(digests, images, strict=True))
        known = {digest: self._book.get(tenant.scope, digest) for digest in by_digest}
        if unknown := [digest for digest, sighting in known.items() if sighting is None]:
            async with self._turns.turn(tenant.id, num_bytes):
                worker, seen, spent_s = await self._looked([by_digest[digest] for digest in unknown], digests[0])
            look_s = max(spent_s / len(unknown), LEAST_LOOK_S)
            for digest, each in zip(unknown, seen, strict=True):
                known[digest] = new = Sighting(seen=_compact(each), look_s=look_s)
                new.note(worker)
                self._book.add(tenant.scope, digest, new)
        sightings = tuple(sighting for digest in digests if (sighting := known[digest]) is not None)
        return RequestImages(encoded=tuple(images), sightings=sightings)

    async def _looked(self, images: Sequence[bytes], first: bytes) -> tuple[Worker, tuple[SeenImage, ...], float]:
        """Return the worker that has looked at images, its answer, and the time that it took.

        Args:
            first: digest of the request's first image.
        """
        until_s = time.monotonic() + self._config.worker_wait_s
        failures: list[BatonError] = []
        tried: set[tuple[str, int]] = set()
        while True:
            worker = next((w for w in self._ranked(first) if (w.info.id, w.info.epoch) not in tried), None)
            if worker is None or len(failures) >= self._config.max_attempts:
                if failures:
                    raise failures[-1]
                await self._wait(until_s)
                continue
            tried.add((worker.info.id, worker.info.epoch))
            began_s = time.monotonic()
            try:
                seen = await self._client.look(worker, images)
                _check(worker, seen, len(images))
                return worker, seen, time.monotonic() - began_s
            except WorkerCallError as failure:
                error = failure.error
                if isinstance(error, InvalidRequest | Unsupported):
                    error.param = error.param or "messages"
                    raise error from failure
                if isinstance(error, WorkerFailed):
                    self._pools.suspect(worker)
                failures.append(error)

    def _ranked(self, first: bytes) -> list[Worker]:
        """Return the workers that may look at the images of a request, the best one first.

        Rendezvous hashing ranks them for the first image, so the turns of a chat ask the same one.
        """
        pools, role = self._pools, Role.DECODE if self._config.mode == Mode.AGGREGATED else Role.PREFILL
        ready = [worker for worker in pools.workers if worker.info.takes_images and pools.is_trusted(worker)]
        ready = [worker for worker in ready if worker.info.role is role] or ready
        wait_s = {worker.info.id: pools.wait_s(worker, (0, False)) for worker in ready}
        limit_s = min(wait_s.values(), default=0.0) + BUSY_S
        session = xxhash.xxh64_intdigest(first)

        def rank(worker: Worker) -> tuple[bool, int]:
            return wait_s[worker.info.id] > limit_s, xxhash.xxh64_intdigest(worker.info.id.encode(), session)

        return sorted(ready, key=rank)

    async def _wait(self, until_s: float) -> None:
        if (left_s := until_s - time.monotonic()) <= 0:
            raise NoWorker(
                f"no worker that takes images became ready within {self._config.worker_wait_s:g} s; `baton status` "
                "shows the pools"
            )
        await self._pools.wait_for_change(left_s)


def _digests(images: Sequence[bytes]) -> list[bytes]:
    return list(map(image_digest, images))


def _check(worker: Worker, seen: Sequence[SeenImage], num_images: int) -> None:
    """Raise WorkerCallError for an answer that no worker of this release gives."""
    if len(seen) == num_images and all(
        len(each.digest) == KEY_BYTES and len(each.grid) <= 3 and each.token_ids for each in seen
    ):
        return
    raise WorkerCallError(worker, WorkerFailed(f"{worker.info.label} gave no valid answer about images"))


def _compact(seen: SeenImage) -> SeenImage:
    """Return an answer whose equal tokens are one object: most of them are the same token."""
    one = dict(zip(seen.token_ids, seen.token_ids, strict=True))
    return replace(seen, token_ids=tuple(one[token_id] for token_id in seen.token_ids))
