"""Values in Redis that only routers may read or write: sealed under a key that they share.

A sealed value is valid under its own name only: a process that writes to Redis cannot put it in the place of another
one, change it, or read it. Sealing does not prevent that a value is left out, or replaced by an older one of the same
name.
"""

from __future__ import annotations

import hashlib
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_FORM = b"\x01"
"""First byte of a sealed value; a later form has another one."""
_NONCE_BYTES = 12
_KEY_BYTES = 32
_SALT = b"baton sealed values v1"


class Seal:
    """Sealing and opening of values with ChaCha20-Poly1305 (RFC 8439).

    Each name has a separate key, so random nonces do not collide however many values there are.

    Args:
        secret: a secret that all routers share, and no other process has.
    """

    def __init__(self, secret: str) -> None:
        derived = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=_SALT, info=b"redis").derive(secret.encode())
        self._master = derived

    def close(self, name: str, field: bytes, value: bytes) -> bytes:
        """Return the value, sealed.

        Args:
            name: the key in Redis.
            field: the field of the hash under it; empty if it is none.
        """
        nonce = os.urandom(_NONCE_BYTES)
        return _FORM + nonce + self._cipher(name).encrypt(nonce, value, _FORM + field)

    def open(self, name: str, field: bytes, sealed: bytes) -> bytes:
        """Return the value that was sealed for this name and field.

        Raises:
            ValueError: it was not, or not by a router of this cluster.
        """
        start = len(_FORM) + _NONCE_BYTES
        try:
            if not sealed.startswith(_FORM) or len(sealed) < start:
                raise InvalidTag
            return self._cipher(name).decrypt(sealed[len(_FORM) : start], sealed[start:], _FORM + field)
        except InvalidTag:
            raise ValueError("it is not sealed by a router of this cluster") from None

    def _cipher(self, name: str) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(hashlib.blake2b(name.encode(), key=self._master, digest_size=_KEY_BYTES).digest())
