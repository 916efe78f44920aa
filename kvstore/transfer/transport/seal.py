"""Encryption of one direction of a connection whose two ends share a secret: AES-GCM, record by record.

Both ends know the length of the next message, and cut it into the same records, so a record is only its ciphertext and
its tag. The number of a record is its nonce: a changed, omitted, repeated or reordered record is rejected. OpenSSL's
TLS does the same over sockets at half the speed, because its records are 16 KiB each.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.errors import TransferCorrupted

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD_BYTES = 2**18
"""Maximum bytes of a message in one record. It and its ciphertext fit a core's second-level cache."""
TAG_BYTES, NONCE_BYTES = 16, 12
RECORDS_A_KEY = 2**16
"""16 GiB: far below the limit of AES-GCM for one key."""


class RecordSeal:
    """One direction of a connection, at one of its ends. Not thread-safe.

    Args:
        secret: at most 64 random bytes that only the two ends know, and use for nothing else.
        direction: a number below 256, the same at both ends and different for the way back.
    """

    def __init__(self, secret: bytes, direction: int) -> None:
        self._secret = secret
        self._direction = direction
        self._num_records = 0
        self._buffer = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))

    def sealed(self, message: memoryview) -> Iterator[memoryview]:
        """Yield the records of a message; each is valid until the next."""
        for part in _parts(message):
            record = self._buffer[: len(part) + TAG_BYTES]
            cipher, nonce = self._next()
            cipher.encrypt_into(nonce, part, None, record)
            yield record

    def opened(self, message: memoryview) -> Iterator[memoryview]:
        """Yield a buffer for each record of a message; after it is filled, the next step decrypts it into the message.

        Raises:
            TransferCorrupted: a record is not the one that the other end sealed.
        """
        for part in _parts(message):
            record = self._buffer[: len(part) + TAG_BYTES]
            yield record
            cipher, nonce = self._next()
            try:
                cipher.decrypt_into(nonce, record, None, part)
            except InvalidTag as error:
                raise TransferCorrupted("the received record is not the one that the peer encrypted") from error

    def _next(self) -> tuple[AESGCM, bytes]:
        """Return the key of the next record, and its nonce, which is new for that key."""
        epoch, place = divmod(self._num_records, RECORDS_A_KEY)
        if place == 0:
            about = bytes([self._direction]) + epoch.to_bytes(8, "big")
            self._cipher = AESGCM(hashlib.blake2b(about, key=self._secret, digest_size=32).digest())
        self._num_records += 1
        return self._cipher, place.to_bytes(NONCE_BYTES, "big")


def _parts(message: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(message), RECORD_BYTES):
        yield message[start : start + RECORD_BYTES]
