"""The images that a worker has received, by the digest of their bytes.

    bytes ── look ──> digest, grid, tokens      the router puts the tokens into the prompt
                 └──> pixels ── prepare ──> embeddings (`engine.model.images`) ── step ──> KV

The bytes of an image are kept as long as a sequence needs it. Its pixels take much more memory and follow from the
bytes, so they are dropped first.
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
    """Inputs of the encoder, in a type of the reader."""
    num_bytes: int
    """Their size in memory."""


class ImageReader(Protocol):
    """Decodes images for one model."""

    placeholder: int
    """Id of the token that stands once per image in a chat, and once per embedding in a prompt."""

    def read(self, encoded: bytes) -> ReadImage:
        """Decode an image and prepare it for the encoder, in up to a second.

        Raises:
            InvalidRequest: it cannot be decoded, or has an unsupported format or size; the message says which.
        """
        ...

    def token_ids(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that take the place of one placeholder.

        Raises:
            InvalidRequest: no image has this grid, or it has too many tokens.
        """
        ...


@dataclass(slots=True)
class _Held:
    encoded: bytes
    seen: SeenImage
    pixels: Any
    num_pixel_bytes: int
    """0: the pixels were dropped."""
    num_pins: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.encoded) + self.num_pixel_bytes


class ImageStore:
    """Received images. Methods may be called in any thread.

    Args:
        reader: decodes images.
        encode: computes the embeddings of a held image, if they are not there.
        max_bytes: maximum size of the held images with their pixels. While more is needed, images are refused.
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

    def look(self, encoded: bytes) -> SeenImage:
        """Decode an image, unless it is held already, and keep it. Takes up to a second.

        Raises:
            InvalidRequest: it is refused; the message says why.
            Overloaded: the images of running sequences leave no room for it.
        """
        digest = blake2b(encoded, digest_size=KEY_BYTES).digest()
        with self._lock:
            if (held := self._held.get(digest)) is not None:
                self._held.move_to_end(digest)
                return held.seen
            self._require_room(len(encoded))
        read = self._reader.read(encoded)
        seen = SeenImage(digest=digest, grid=read.grid, token_ids=self._reader.token_ids(read.grid))
        with self._lock:
            if digest not in self._held:
                self._held[digest] = _Held(encoded, seen, read.pixels, read.num_bytes)
                self._shrink()
        return seen

    def holds(self, images: Sequence[PlacedImage]) -> bool:
        """Return whether all these images are held."""
        with self._lock:
            return all(image.digest in self._held for image in images)

    @contextlib.contextmanager
    def pinned(self, images: Sequence[PlacedImage]) -> Iterator[None]:
        """Context manager: keep those of these images that are held."""
        with self._lock:
            pinned = [held for image in images if (held := self._held.get(image.digest)) is not None]
            for held in pinned:
                held.num_pins += 1
                self._held.move_to_end(held.seen.digest)
        try:
            yield
        finally:
            with self._lock:
                for held in pinned:
                    held.num_pins -= 1
                self._shrink()

    def prepare(self, images: Sequence[PlacedImage]) -> None:
        """Compute the embeddings of images, so that no step waits for them. Takes up to minutes on a CPU.

        Raises:
            ImagesMissing: one of them is not held.
            InvalidRequest: one of them has another number of embeddings than placeholders.
        """
        for image in images:
            self._encode(image)

    def pixels(self, digest: bytes) -> Any:
        """Return the pixels of an image, which is decoded again if they were dropped.

        Raises:
            ImagesMissing: it is not held.
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
        """Require that the images of a sequence stand in its prompt with the tokens that belong to them.

        Raises:
            InvalidRequest: they do not.
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
        """Drop what was not used for longest: images that no sequence needs, and the pixels of the others."""
        excess = self._num_bytes() - self._max_bytes
        for digest in list(self._held) if excess > 0 else ():
            held = self._held[digest]
            if not held.num_pins and digest != next(reversed(self._held)):
                del self._held[digest]
                excess -= held.num_bytes
            else:
                excess -= held.num_pixel_bytes
                held.pixels, held.num_pixel_bytes = None, 0
            if excess <= 0:
                return
