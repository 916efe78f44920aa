"""Puts what workers have seen of a prompt's images into its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import InvalidRequest
from baton.messages import PlacedImage, SeenImage


def with_images(
    prompt_ids: Sequence[int], placeholder: int, seen: Sequence[SeenImage]
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    """Return a prompt with each image's tokens in place of its placeholder, and the places of the images.

    Args:
        prompt_ids: tokens of the rendered chat, with one placeholder per image, in the images' order.
        placeholder: the token that stands for an image.

    Raises:
        InvalidRequest: the prompt does not have one placeholder per image. A client cannot add any: see
            `router.prompt.literal`.
    """
    num_places = prompt_ids.count(placeholder)
    if num_places != len(seen):
        raise InvalidRequest(
            f"the model's chat template writes {num_places} places for {len(seen)} images; send images in a "
            "user's message only, and no special tokens of the model",
            "messages",
        )
    token_ids: list[int] = []
    placed: list[PlacedImage] = []
    begin = 0
    for image in seen:
        end = prompt_ids.index(placeholder, begin)
        token_ids += prompt_ids[begin:end]
        placed.append(image.placed(len(token_ids)))
        token_ids += image.token_ids
        begin = end + 1
    token_ids += prompt_ids[begin:]
    return tuple(token_ids), tuple(placed)
