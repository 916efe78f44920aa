"""Received images stay as long as a sequence needs them, within a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.errors import ImagesMissing, InvalidRequest, Overloaded
from baton.messages import PlacedImage, SeenImage
from engine.core.image_store import ImageStore, ReadImage
from tests.support.builders import sequence_spec

SEED = b"seed"
SIZE = 100
"""Bytes of each image; its pixels take ten times as much."""


class Reader:
    """An image is a byte, repeated; it has that many tokens."""

    placeholder = 7

    def __init__(self) -> None:
        self.read_of: list[int] = []

    def read(self, encoded: bytes) -> ReadImage:
        if not encoded[0]:
            raise InvalidRequest("a test")
        self.read_of.append(encoded[0])
        return ReadImage((encoded[0],), f"pixels of {encoded[0]}", 10 * SIZE)

    def token_ids(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        return (self.placeholder,) * grid[0]


def image(number: int, size: int = SIZE) -> bytes:
    return bytes([number]) * size


def store_of(most: int) -> tuple[ImageStore, Reader, list[PlacedImage]]:
    reader, encoded = Reader(), list[PlacedImage]()
    return ImageStore(reader, encoded.append, most), reader, encoded


def placed(*seen: SeenImage) -> list[PlacedImage]:
    return [each.placed(3) for each in seen]


def held(store: ImageStore, seen: Sequence[SeenImage]) -> list[bool]:
    return [store.holds(placed(each)) for each in seen]


def test_an_image_is_decoded_once() -> None:
    store, reader, encoded = store_of(10_000)
    first, again, other = store.look(image(5), SEED), store.look(image(5), SEED), store.look(image(6), SEED)
    assert first == again != other
    assert (len(first.digest), first.token_ids, other.grid) == (16, (7,) * 5, (6,))
    assert reader.read_of == [5, 6]
    assert store.pixels(first.digest) == "pixels of 5"
    assert store.num_bytes == 2 * 11 * SIZE
    assert store.placeholder == 7
    store.prepare(placed(first))
    assert encoded == placed(first)


def test_cache_scopes_share_no_image() -> None:
    store, reader, _ = store_of(10_000)
    first, other = store.look(image(5), SEED), store.look(image(5), b"other")
    assert reader.read_of == [5, 5]
    assert first.digest != other.digest
    assert (first.grid, first.token_ids) == (other.grid, other.token_ids)
    assert store.look(image(5), b"other") == other


def test_pixels_go_first_then_images_that_nothing_needs_the_longest_unused_first() -> None:
    store, reader, _ = store_of(15 * SIZE)
    seen = [store.look(image(number), SEED) for number in range(1, 5)]
    assert held(store, seen) == [True] * 4
    assert store.num_bytes == 14 * SIZE, "of the last one only the pixels are left"
    assert store.pixels(seen[0].digest) == "pixels of 1"
    assert reader.read_of == [1, 2, 3, 4, 1]
    with store.pinned(placed(seen[1])):
        seen += [store.look(image(number), SEED) for number in range(5, 8)]
        assert not held(store, seen)[2]
        assert held(store, seen)[1]
        assert held(store, seen)[-1]
        assert store.num_bytes <= 15 * SIZE
    seen += [store.look(image(number), SEED) for number in range(8, 20)]
    assert not held(store, seen)[1]
    assert store.num_bytes <= 15 * SIZE


def test_an_image_that_comes_again_is_kept_longer() -> None:
    store, _, _ = store_of(13 * SIZE)
    seen = [store.look(image(number), SEED) for number in (1, 2, 3, 1, 4)]
    assert held(store, seen) == [True, False, True, True, True]


def test_an_image_whose_pixels_never_fit_drops_no_other() -> None:
    store, _, _ = store_of(5 * SIZE)
    seen = [store.look(image(number), SEED) for number in range(1, 5)]
    assert held(store, seen) == [True] * 4
    assert store.num_bytes == 4 * SIZE
    assert store.pixels(seen[0].digest) == "pixels of 1"
    assert store.num_bytes == 4 * SIZE


def test_running_sequences_may_fill_the_store_and_then_images_are_refused() -> None:
    store, _, _ = store_of(2 * SIZE)
    seen = [store.look(image(number), SEED) for number in (1, 2)]
    with store.pinned(placed(*seen)), store.pinned(placed(seen[0])):
        assert store.look(image(1), SEED) == seen[0]
        with pytest.raises(Overloaded, match=r"fill engine\.image_cache_gib"):
            store.look(image(3), SEED)
        assert held(store, seen) == [True, True]
    assert store.look(image(3), SEED).grid == (3,)
    with pytest.raises(InvalidRequest, match=r"300 bytes does not fit .* 200 bytes"):
        store.look(image(4, 3 * SIZE), SEED)


def test_what_is_refused_or_unknown_is_not_held() -> None:
    store, _, _ = store_of(10_000)
    with pytest.raises(InvalidRequest, match="a test"):
        store.look(image(0), SEED)
    assert store.num_bytes == 0
    with pytest.raises(ImagesMissing, match="does not hold the bytes"):
        store.pixels(b"unknown")
    with store.pinned(placed(SeenImage(digest=b"unknown", grid=(1,), token_ids=(7,)))):
        pass


def test_the_tokens_of_images_must_be_theirs() -> None:
    store, _, _ = store_of(10_000)
    (found,) = placed(store.look(image(2), SEED))
    for tokens in ([1, 2, 3, 7, 7, 4], [1, 2, 3, 7]):
        store.require_placed(sequence_spec(tokens, images=(found,)))
    for tokens in ([1, 2, 3, 7, 4, 4], [1, 2, 3], [7, 7, 7, 4, 7]):
        with pytest.raises(InvalidRequest, match="the tokens from position 3 on are not those of an image"):
            store.require_placed(sequence_spec(tokens, images=(found,)))
    with pytest.raises(InvalidRequest):
        store.require_placed(sequence_spec([1, 2, 3, 7, 4], images=(replace(found, num_tokens=1),)))
