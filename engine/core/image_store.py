"""Store of the images that a worker has received, by a digest of their bytes.

    bytes ── look ──> digest, grid, tokens      the router puts the tokens into the prompt
                 └──> pixels ── prepare ──> embeddings (`engine.model.images`) ── step ──> KV

The digest is keyed with the cache seed. So an image has another digest in each cache scope, and is decoded and encoded
again: a tenant cannot learn from the duration of a request whether another tenant has sent an image.

The bytes of an image are kept while a sequence needs the image. Pixels take much more memory and can be decoded from
the bytes again, so they are dropped first.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from baton.blocks import KEY_BYTES
from baton.errors import ImagesMissing, InvalidRequest, Overloaded
from baton.messages import PlacedImage, SeenImage, SequenceSpec


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image that was decoded and prepared for the model's encoder."""

    grid: tuple[int, ...]
    """See `PlacedImage.grid`."""
    pixels: Any
    """Inputs of the encoder; the reader defines their type."""
    num_bytes: int
    """Size of the pixels in memory."""


class ImageReader(Protocol):
    """Decodes images for one model."""

    placeholder: int
    """Id of the placeholder token. A rendered chat has one per image, and a prompt one per embedding."""

    def read(self, encoded: bytes) -> ReadImage:
        """Decode an image and prepare it for the encoder. This takes up to a second.

        Raises:
            InvalidRequest: it cannot be decoded, or has an unsupported format or size; the message says which.
        """
        ...

    def token_ids(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that take the place of one placeholder.

        Raises:
            InvalidRequest: no image has this grid.
        """
        ...


@dataclass(slots=True, kw_only=True)
class _Held:
    encoded: bytes
    seen: SeenImage
    pixels: Any
    num_pixel_bytes: int
    """Size of the pixels; 0: they were dropped."""
    num_pins: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.encoded) + self.num_pixel_bytes

    def drop_pixels(self) -> int:
        """Drop the pixels, and return the number of bytes that this freed."""
        freed, self.num_pixel_bytes, self.pixels = self.num_pixel_bytes, 0, None
        return freed


class ImageStore:
    """Received images. Methods may be called in any thread.

    Args:
        reader: decodes images.
        encode: computes the embeddings of a held image, unless they are kept.
        max_bytes: maximum size of the held images with their pixels. If running sequences need all of it, further
            images are refused.
    """

    def __init__(self, reader: ImageReader, encode: Callable[[PlacedImage], object], max_bytes: int) -> None:
        self._reader = reader
        self._encode = encode
        self._max_bytes = max_bytes
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        """Least recently used first."""
        self._lock = threading.Lock()

    @property
    def placeholder(self) -> int:
        """See `ImageReader.placeholder`."""
        return self._reader.placeholder

    @property
    def num_bytes(self) -> int:
        """Size of the held images with their pixels."""
        with self._lock:
            return self._num_bytes()

    def look(self, encoded: bytes, cache_seed: bytes) -> SeenImage:
        """Decode an image, unless it is held already, and keep it. This takes up to a second.

        Args:
            cache_seed: at most 64 bytes; see `SequenceSpec.cache_seed`.

        Raises:
            InvalidRequest: the image is refused; the message says why.
            Overloaded: the images of running sequences leave no memory for it.
        """
        digest = blake2b(encoded, digest_size=KEY_BYTES, key=cache_seed).digest()
        with self._lock:
            if (held := self._held.get(digest)) is not None:
                self._held.move_to_end(digest)
                return held.seen
            self._require_room(len(encoded))
        read = self._reader.read(encoded)
        seen = SeenImage(digest=digest, grid=read.grid, token_ids=self._reader.token_ids(read.grid))
        with self._lock:
            if digest not in self._held:
                self._held[digest] = _Held(
                    encoded=encoded, seen=seen, pixels=read.pixels, num_pixel_bytes=read.num_bytes
                )
                self._shrink()
        return seen

    def holds(self, images: Sequence[PlacedImage]) -> bool:
        """Return whether the worker holds all these images."""
        with self._lock:
            return all(image.digest in self._held for image in images)

    @contextlib.contextmanager
    def pinned(self, images: Sequence[PlacedImage]) -> Iterator[frozenset[bytes]]:
        """Context manager: keep the bytes of these images, as far as the worker holds them. Return their digests."""
        with self._lock:
            pinned = [held for image in images if (held := self._held.get(image.digest)) is not None]
            for held in pinned:
                held.num_pins += 1
                self._held.move_to_end(held.seen.digest)
        try:
            yield frozenset(held.seen.digest for held in pinned)
        finally:
            with self._lock:
                for held in pinned:
                    held.num_pins -= 1
                self._shrink()

    def prepare(self, images: Sequence[PlacedImage]) -> None:
        """Compute the embeddings of images, so that no step waits for them. On a CPU this takes up to minutes.

        Raises:
            ImagesMissing: the worker does not hold one of the images, and its embeddings are not kept.
            InvalidRequest: an image has another number of embeddings than placeholders.
        """
        for image in images:
            self._encode(image)

    def pixels(self, digest: bytes) -> Any:
        """Return the pixels of an image. Decode the image again if they were dropped.

        Raises:
            ImagesMissing: the worker does not hold the image.
        """
        with self._lock:
            held = self._held.get(digest)
            if held is None:
                raise ImagesMissing
            self._held.move_to_end(digest)
            if held.num_pixel_bytes:
                return held.pixels
        read = self._reader.read(held.encoded)
        with self._lock:
            held.pixels, held.num_pixel_bytes = read.pixels, read.num_bytes
            self._shrink()
        return read.pixels

    def require_placed(self, spec: SequenceSpec) -> None:
        """Require that the prompt of a sequence has the tokens of each image at the image's position.

        Raises:
            InvalidRequest: it has other tokens there.
        """
        for image in spec.images:
            expected = self._reader.token_ids(image.grid)
            found = spec.token_ids[image.offset : image.end]
            # The last image of a prefix may be cut.
            if len(expected) != image.num_tokens or found != expected[: len(found)] or not found:
                raise InvalidRequest(
                    f"the tokens from position {image.offset} on are not those of an image with the grid {image.grid}"
                )

    def _require_room(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"an image of {num_bytes} bytes does not fit into engine.image_cache_gib, which is {self._max_bytes} "
                "bytes; send a smaller one"
            )
        pinned = sum(len(held.encoded) for held in self._held.values() if held.num_pins)
        if pinned + num_bytes > self._max_bytes:
            raise Overloaded("the images of running requests fill engine.image_cache_gib; try again later")

    def _num_bytes(self) -> int:
        return sum(held.num_bytes for held in self._held.values())

    def _shrink(self) -> None:
        """Free memory above the limit: pixels, then images that no sequence needs, then the pixels of the newest image.

        The least recently used image comes first.
        """
        if not self._held:
            return
        *others, newest = self._held.values()
        if newest.num_bytes > self._max_bytes:
            newest.drop_pixels()
        excess = self._num_bytes() - self._max_bytes
        for held in others:
            if excess > 0:
                excess -= held.drop_pixels()
        for held in others:
            if excess > 0 and not held.num_pins:
                del self._held[held.seen.digest]
                excess -= held.num_bytes
        if excess > 0:
            newest.drop_pixels()
