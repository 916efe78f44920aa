"""Images in clients' requests: how APIs carry them, and their bounds.

An image is the bytes of a PNG, JPEG, WebP or GIF file. Only workers decode it. APIs carry it in the request itself, as
bytes or as base64. No URL is ever fetched, so a client cannot make the cluster send requests to other hosts.
"""

from __future__ import annotations

import binascii
import hashlib
from typing import Any

from baton.blocks import KEY_BYTES
from baton.errors import InvalidRequest, Unsupported

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
MAX_IMAGE_BYTES = 24 * 2**20
"""Upper bound of the size of one image; `router.max_image_bytes` may be lower."""
MAX_IMAGES = 64
"""Upper bound of the number of images of a request; `router.max_images` may be lower."""
MAX_REQUEST_BYTES = MAX_IMAGE_BYTES
"""Maximum total size of the images of a request, and so of those in one message to a worker."""
_OTHER_NAMES = {"image/jpg": "image/jpeg"}
_MAX_HEAD = 128
"""Maximum length of the part of a data URL before its data."""
_STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")


def image_digest(image: bytes) -> bytes:
    """Return the digest that names an image in block keys; `KEY_BYTES` long."""
    return hashlib.blake2b(image, digest_size=KEY_BYTES).digest()


def image_in_url(url: Any, where: str) -> bytes:
    """Return the image of a data URL.

    Args:
        url: a JSON value.
        where: path of the field, for the errors.

    Raises:
        InvalidRequest: it is no data URL of an image.
        Unsupported: it is the URL of a file elsewhere, or its media type is not supported.
    """
    if not isinstance(url, str):
        raise InvalidRequest(f"{where} must be a string, a data URL", where)
    if not url[:5].lower() == "data:":
        raise Unsupported(
            f"{where} is not a data URL; the router fetches no URL, so send the image itself, as "
            "data:image/png;base64,...",
            where,
        )
    head, comma, data = url[5:].partition(",")
    media_type, semicolon, encoding = head[:_MAX_HEAD].lower().rpartition(";")
    if not comma or not semicolon or encoding != "base64":
        raise InvalidRequest(f"{where} must have the form data:image/png;base64,...", where)
    return image_in_base64(data, media_type, where)


def image_in_base64(data: Any, media_type: Any, where: str) -> bytes:
    """Return the image that a base64 text holds.

    Args:
        data, media_type: JSON values.
        where: path of the field, for the errors.

    Raises:
        InvalidRequest: the text is not base64, or holds no image; see `check_image`.
        Unsupported: the media type is not supported.
    """
    if not isinstance(media_type, str) or _OTHER_NAMES.get(media_type, media_type) not in MEDIA_TYPES:
        raise Unsupported(f"{where} must have a media type out of {', '.join(MEDIA_TYPES)}", where)
    if not isinstance(data, str):
        raise InvalidRequest(f"{where} must be a string in base64", where)
    if len(data) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise InvalidRequest(f"{where} is longer than an image of {MAX_IMAGE_BYTES} bytes; send a smaller one", where)
    if len(data) % 4:  # which the decoder below may take
        raise InvalidRequest(f"{where} is not valid base64: its padding is wrong", where)
    try:
        image = binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:  # binascii.Error, or a character that is not ASCII
        raise InvalidRequest(f"{where} is not valid base64: {error}", where) from None
    check_image(image, where)
    return image


def check_image(image: bytes, where: str) -> None:
    """Check the first bytes and the size of an image; only a worker can check the rest.

    Raises:
        InvalidRequest: it is too large, or of another format.
    """
    if len(image) > MAX_IMAGE_BYTES:
        raise InvalidRequest(f"{where} has {len(image)} bytes; the limit is {MAX_IMAGE_BYTES}", where)
    is_webp = image[:4] == b"RIFF" and image[8:12] == b"WEBP"
    if not (is_webp or image.startswith(_STARTS)):
        raise InvalidRequest(f"{where} is not a PNG, JPEG, WebP or GIF image", where)
