"""Limits on the images of requests, and on the memory that those of running requests take."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from baton.api import Chat, PromptInput
from baton.config import RouterConfig
from baton.errors import InvalidRequest, Overloaded
from baton.images import MAX_IMAGE_BYTES, MAX_IMAGES, MAX_REQUEST_BYTES

NO_IMAGES: tuple[bytes, ...] = ()


class ImageMemory:
    """Memory of the images of one router's running requests. One tenant may have half of it."""

    def __init__(self, config: RouterConfig) -> None:
        self._max_images = min(config.max_images, MAX_IMAGES)
        self._max_bytes = min(config.max_image_bytes, MAX_IMAGE_BYTES)
        self._memory_bytes = config.image_memory_bytes
        self._held: Counter[str] = Counter()
        """Bytes by tenant; tenants without any are not listed."""

    @property
    def num_held_bytes(self) -> int:
        return self._held.total()

    @contextlib.contextmanager
    def holding(self, prompt: PromptInput, tenant_id: str) -> Iterator[tuple[bytes, ...]]:
        """Context manager: counts the images of a request while it runs, and yields them.

        Raises:
            InvalidRequest: they are too many, or too large.
            Overloaded: the images of running requests, of all tenants or of this one, take too much memory.
        """
        images = prompt.images if isinstance(prompt, Chat) else NO_IMAGES
        if not images:
            yield images
            return
        self._check(images)
        num_bytes = sum(map(len, images))
        if (
            self._held.total() + num_bytes > self._memory_bytes
            or self._held[tenant_id] + num_bytes > self._memory_bytes / 2
        ):
            raise Overloaded("the images of running requests take all memory for images; try again later")
        self._held[tenant_id] += num_bytes
        try:
            yield images
        finally:
            self._held[tenant_id] -= num_bytes
            if not self._held[tenant_id]:
                del self._held[tenant_id]

    def _check(self, images: tuple[bytes, ...]) -> None:
        if len(images) > self._max_images:
            raise InvalidRequest(f"the request has {len(images)} images; send at most {self._max_images}", "messages")
        longest, total = max(map(len, images)), sum(map(len, images))
        if longest > self._max_bytes:
            raise InvalidRequest(
                f"an image has {longest} bytes; send images of at most {self._max_bytes} bytes", "messages"
            )
        if total > (most := min(MAX_REQUEST_BYTES, self._memory_bytes // 2)):
            raise InvalidRequest(f"the images have {total} bytes together; send at most {most} bytes", "messages")
