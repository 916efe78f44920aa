"""Images of requests: before a prompt is placed, a worker decodes its images, and keeps their pixels for a while.

The worker replies with the tokens that replace each image's placeholder. The router caches the replies. So an image
that comes again, as in each further request of a conversation, needs no call. For requests with the same first image
the router calls the same worker, while that worker is available and not much busier than the others. Placement prefers
a worker that has decoded the images, because another one needs the bytes and must decode them again.

The router keeps the bytes of images only while their request runs. The cached replies contain no bytes. They are kept
by cache scope, and so are the images on the workers: a tenant cannot learn from the duration of a request whether
another tenant has sent an image.
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
from router.placement import ImageCosts, Mode
from router.placement.pool_view import PoolView
from router.serve.waking import Waker
from router.serve.worker_client import LOOK_TIMEOUT_S, WorkerCallError, WorkerClient

MAX_KEPT, MAX_KEPT_TOKENS = 4096, 2**20
"""Limits on the cached replies: the number of images, and their tokens together. They take about 16 MiB."""
MAX_HOLDERS = 4
"""Maximum number of workers that are recorded as holders of an image."""
NUM_LOOKING, MAX_WAITING_BYTES = 8, 64 * 2**20
"""Maximum number of concurrent `Look` calls, and maximum size of the images that wait for one, in bytes."""
BUSY_S = 2.0
"""A worker ranks last if its prompts wait this much longer than those of the least busy worker, in seconds."""
LEAST_LOOK_S = 0.02
"""Least cost of decoding an image again on another worker, in seconds."""
MAX_INLINE_BYTES = 2**18
"""The images of a request are hashed in a thread if they have more bytes together."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sighting:
    """A worker's reply about an image, and the workers that hold the pixels."""

    seen: SeenImage
    look_s: float
    """Time to send the bytes and decode them, in seconds."""
    holders: dict[tuple[str, int], None] = field(default_factory=dict)
    """Workers, by id and epoch, that received the bytes; the latest is last."""

    def is_held_by(self, worker: Worker) -> bool:
        """Return whether a worker presumably holds the pixels."""
        return (worker.info.id, worker.info.epoch) in self.holders

    def note(self, worker: Worker) -> None:
        """Record that a worker receives the bytes."""
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
    """Images of a running request. All choices of the request share them."""

    encoded: tuple[bytes, ...] = field(repr=False)
    sightings: tuple[Sighting, ...]
    """One per image, in the order of the images."""

    @property
    def seen(self) -> tuple[SeenImage, ...]:
        return tuple(sighting.seen for sighting in self.sightings)

    def costs(self, spec: SequenceSpec) -> ImageCosts:
        """Return the additional costs of computing the sequence on workers that do not hold all of its images."""
        saved: dict[str, float] = {}
        for sighting in set(self.sightings):
            for worker_id, _ in sighting.holders:
                saved[worker_id] = saved.get(worker_id, 0.0) + sighting.look_s
        total_s = sum(sighting.look_s for sighting in set(self.sightings))
        return ImageCosts(total_s=total_s, saved_s=saved, end=spec.images[-1].end)

    def lacking(self, worker: Worker, spec: SequenceSpec, num_cached_tokens: int) -> tuple[bytes, ...]:
        """Return the images that a worker needs and presumably does not hold, and record that it receives them.

        Args:
            num_cached_tokens: number of leading tokens that the worker presumably caches. It does not need the images
                among them.
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
        """Return all images, each once, and record that a worker receives them."""
        for sighting in self.sightings:
            sighting.note(worker)
        return tuple(dict(zip(self.sightings, self.encoded, strict=True)).values())

    def forget(self, worker: Worker) -> None:
        """Record that a worker does not hold the images."""
        for sighting in self.sightings:
            sighting.forget(worker)


class SeenBook:
    """Cache of workers' replies about images, by cache scope and digest. The least recently used ones are evicted."""

    def __init__(self, most: int = MAX_KEPT, most_tokens: int = MAX_KEPT_TOKENS) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._known: OrderedDict[tuple[str, bytes], Sighting] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, scope: str, digest: bytes) -> Sighting | None:
        """Return the cached reply about an image; None: there is none."""
        found = self._known.get((scope, digest))
        if found is not None:
            self._known.move_to_end((scope, digest))
        return found

    def add(self, scope: str, digest: bytes, sighting: Sighting) -> None:
        """Cache the reply about an image."""
        known = self._known.pop((scope, digest), None)
        self._num_tokens += len(sighting.seen.token_ids) - (len(known.seen.token_ids) if known else 0)
        self._known[scope, digest] = sighting
        while len(self._known) > self._most or self._num_tokens > self._most_tokens:
            _, forgotten = self._known.popitem(last=False)
            self._num_tokens -= len(forgotten.seen.token_ids)


class ImageLooker:
    """Sends the images of one router's requests to workers, which decode them."""

    def __init__(self, *, pools: PoolView, client: WorkerClient, config: RouterConfig, waker: Waker) -> None:
        self._pools = pools
        self._waker = waker
        self._client = client
        self._config = config
        self._book = SeenBook()
        self._turns = Turns(NUM_LOOKING, MAX_WAITING_BYTES)

    async def placeholder(self) -> int:
        """Return the placeholder of an image in a rendered chat.

        Raises:
            Unsupported: no worker takes images.
            NoWorker: no worker became ready in time.
        """
        began_s = time.monotonic()
        until_s = began_s + self._config.worker_wait_s
        while (found := self._pools.image_placeholder) is None:
            if self._pools.workers:
                raise Unsupported("this model takes no images; send text only", "messages")
            until_s = await self._wait(began_s, until_s)
        return found

    async def look(self, images: Sequence[bytes], tenant: Tenant, cache_seed: bytes) -> RequestImages:
        """Return the images of a request with a worker's reply for each.

        An image without a cached reply is first sent to a worker, which decodes it.

        Args:
            cache_seed: seed of the block keys of this tenant's sequences.

        Raises:
            InvalidRequest, Unsupported: a worker refuses an image.
            Overloaded: too many images wait for a worker, or they were not decoded within `LOOK_TIMEOUT_S`.
            NoWorker, WorkerFailed: no worker can decode them.
        """
        num_bytes = sum(map(len, images))
        digests = _digests(images) if num_bytes <= MAX_INLINE_BYTES else await asyncio.to_thread(_digests, images)
        by_digest = dict(zip(digests, images, strict=True))
        known = {digest: self._book.get(tenant.scope, digest) for digest in by_digest}
        if unknown := [digest for digest, sighting in known.items() if sighting is None]:
            async with self._turns.turn(tenant.id, num_bytes):
                worker, seen, spent_s = await self._looked(
                    [by_digest[digest] for digest in unknown], digests[0], cache_seed
                )
            look_s = max(spent_s / len(unknown), LEAST_LOOK_S)
            for digest, each in zip(unknown, seen, strict=True):
                known[digest] = new = Sighting(seen=_compact(each), look_s=look_s)
                new.note(worker)
                self._book.add(tenant.scope, digest, new)
        sightings = tuple(sighting for digest in digests if (sighting := known[digest]) is not None)
        return RequestImages(encoded=tuple(images), sightings=sightings)

    async def _looked(
        self, images: Sequence[bytes], first: bytes, cache_seed: bytes
    ) -> tuple[Worker, tuple[SeenImage, ...], float]:
        """Return the worker that has decoded images, its reply, and the time that the call took, in seconds.

        Args:
            first: digest of the request's first image.
        """
        waits_since_s = time.monotonic()
        until_s = waits_since_s + self._config.worker_wait_s
        left_s = LOOK_TIMEOUT_S
        """Shared by all attempts: images that take one worker too long would only keep the next one busy too."""
        failures: list[BatonError] = []
        tried: set[tuple[str, int]] = set()
        while True:
            worker = next((w for w in self._ranked(first) if (w.info.id, w.info.epoch) not in tried), None)
            if worker is None or len(failures) >= self._config.max_attempts or left_s < LEAST_LOOK_S:
                if failures:
                    raise failures[-1]
                until_s = await self._wait(waits_since_s, until_s)
                continue
            tried.add((worker.info.id, worker.info.epoch))
            began_s = time.monotonic()
            try:
                seen = await self._client.look(worker, images, cache_seed, left_s)
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
                left_s -= time.monotonic() - began_s

    def _ranked(self, first: bytes) -> list[Worker]:
        """Return workers that may decode the images of a request, the best one first.

        Rendezvous hashing with the first image ranks them, so all requests of a conversation go to the same worker.
        """
        pools, session = self._pools, xxhash.xxh64_intdigest(first)
        ready = pools.for_images(Role.DECODE if self._config.mode == Mode.AGGREGATED else Role.PREFILL, session)
        wait_s = {worker.info.id: pools.wait_s(worker, (0, False)) for worker in ready}
        limit_s = min(wait_s.values(), default=0.0) + BUSY_S

        def rank(worker: Worker) -> tuple[bool, int]:
            return wait_s[worker.info.id] > limit_s, xxhash.xxh64_intdigest(worker.info.id.encode(), session)

        return sorted(ready, key=rank)

    async def _wait(self, began_s: float, until_s: float) -> float:
        """Wait for a change of the pools, and return the time until which to wait for the next one.

        Args:
            began_s: start of the wait.
            until_s: the latest result, or at first `began_s + router.worker_wait_s`.

        Raises:
            NoWorker: the time has passed.
        """
        if self._pools.sleeps:
            until_s = self._waker.wait_until_s(began_s, until_s)
        if (left_s := until_s - time.monotonic()) <= 0:
            if self._pools.sleeps:
                raise self._waker.why_asleep()
            raise NoWorker(
                f"no worker that takes images became ready within {self._config.worker_wait_s:g} s; `baton status` "
                "shows the pools"
            )
        await self._pools.wait_for_change(left_s)
        return until_s


def _digests(images: Sequence[bytes]) -> list[bytes]:
    return list(map(image_digest, images))


def _check(worker: Worker, seen: Sequence[SeenImage], num_images: int) -> None:
    """Raise WorkerCallError for a reply that no worker of this release sends."""
    if len(seen) == num_images and all(
        len(each.digest) == KEY_BYTES and len(each.grid) <= 3 and each.token_ids for each in seen
    ):
        return
    raise WorkerCallError(worker, WorkerFailed(f"{worker.info.label} gave no valid answer about images"))


def _compact(seen: SeenImage) -> SeenImage:
    """Return a reply whose equal tokens are one object, which saves memory: most tokens are the placeholder."""
    one = dict(zip(seen.token_ids, seen.token_ids, strict=True))
    return replace(seen, token_ids=tuple(one[token_id] for token_id in seen.token_ids))
