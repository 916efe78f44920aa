"""Keys of a cluster's members: derived from the cluster's secret, read from text, used to sign and to verify.

A key file is text. Each of its lines is one of

    SECRET                      a secret of the cluster: at least 32 characters without a space
    private MEMBER BASE64       the private key of the one member that owns this file
    public MEMBER BASE64        the public key of a member

and text after `#` is a comment. Several secrets may be valid at a time, so that they can be changed while the cluster
serves: signatures by any of them are valid, and the first one signs. A member's file has the same keys, derived
(`member_file`), but not the secret, from which the keys of the other members could be derived.

Signatures are Ed25519 (RFC 8032), seeds HKDF-SHA256 of the secret (RFC 5869).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from baton.errors import ConfigError

MIN_SECRET_CHARACTERS = 32
MAX_FILE_BYTES = 2**16
MAX_SECRETS = 16
KEY_ID_BYTES = 8
SIGNATURE_BYTES = KEY_ID_BYTES + 64
"""Size of a signature: the id of its key, and Ed25519's 64 bytes."""
_SALT = b"baton members v1"


class Principal(StrEnum):
    """Role of a process towards the other members of its cluster. Each role has its own keys."""

    ROUTER = "router"
    WORKER = "worker"
    CONTROLLER = "controller"
    OPERATOR = "operator"
    """A command that an operator runs next to the cluster, such as `baton leave`."""


PublicKeys: TypeAlias = Mapping[bytes, Ed25519PublicKey]


@dataclass(frozen=True, slots=True)
class KeyRing:
    """One member's private key, and every member's public keys by their id, in the order of their secrets."""

    principal: Principal
    private: Ed25519PrivateKey
    public: Mapping[Principal, PublicKeys]

    def sign(self, purpose: str, message: bytes) -> bytes:
        """Return this member's signature of the message, `SIGNATURE_BYTES` long, valid for that purpose only."""
        return key_id(self.private.public_key()) + self.private.sign(_framed(purpose, message))

    def verify(self, purpose: str, member: Principal, message: bytes, signature: bytes) -> bool:
        """Return whether that member signed the message for that purpose."""
        key = self.public[member].get(signature[:KEY_ID_BYTES])
        if key is None or len(signature) != SIGNATURE_BYTES:
            return False
        try:
            key.verify(signature[KEY_ID_BYTES:], _framed(purpose, message))
        except InvalidSignature:
            return False
        return True

    def knows(self, member: Principal, signature: bytes) -> bool:
        """Return whether the key that has made a signature is still a valid one of that member."""
        return signature[:KEY_ID_BYTES] in self.public[member]

    def beside(self, former: KeyRing) -> KeyRing:
        """Return these keys, with another ring's public ones after them."""
        public = {member: {**self.public[member], **former.public[member]} for member in Principal}
        return KeyRing(self.principal, self.private, public)

    @property
    def fingerprint(self) -> str:
        """Id of the newest keys of the cluster, 16 hexadecimal digits; equal in all processes with the same secret."""
        return self.fingerprints[0]

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Ids of all valid keys of the cluster, one id per secret, the newest first."""
        secrets_ids = zip(*(self.public[member] for member in Principal), strict=False)
        return tuple(hashlib.sha256(b"".join(ids)).hexdigest()[:16] for ids in secrets_ids)


def _framed(purpose: str, message: bytes) -> bytes:
    return b"baton " + purpose.encode() + b"\0" + message


def key_id(key: Ed25519PublicKey) -> bytes:
    """Return the first bytes of the SHA-256 of a public key."""
    return hashlib.sha256(key.public_bytes_raw()).digest()[:KEY_ID_BYTES]


def draw_secret() -> str:
    """Return a new random secret of a cluster, 64 characters."""
    return secrets.token_hex(32)


def load_keys(text: str, member: Principal, source: str) -> KeyRing:
    """Return a member's keys from the text of a key file.

    Args:
        source: the file's name, for errors.

    Raises:
        ConfigError: the text has another form, or no keys for this member; the message quotes no key.
    """
    private: list[Ed25519PrivateKey] = []
    public: dict[Principal, dict[bytes, Ed25519PublicKey]] = {each: {} for each in Principal}
    for number, words in _lines(text):
        try:
            if len(words) == 1:
                derived = _derive(words[0])
                private.append(derived[member])
                found = {each: key.public_key() for each, key in derived.items()}
            else:
                kind, owner, key = words
                if kind == "private" and owner == member:
                    private.append(Ed25519PrivateKey.from_private_bytes(_bytes(key)))
                    continue
                if kind != "public":
                    raise ValueError(f"it is neither the {member}'s private key nor a public key")
                found = {Principal(owner): Ed25519PublicKey.from_public_bytes(_bytes(key))}
        except ValueError as error:
            raise ConfigError(f"line {number} of {source} is neither a secret nor a key: {_reason(error)}") from None
        for each, found_key in found.items():
            public[each][key_id(found_key)] = found_key
    if not private or not all(public.values()):
        raise ConfigError(f"{source} has neither a secret nor the keys of the {member}")
    if len(private) > MAX_SECRETS:
        raise ConfigError(f"{source} has more than {MAX_SECRETS} secrets")
    return KeyRing(member, private[0], public)


def member_file(text: str, member: Principal, source: str) -> str:
    """Return the text of a member's own key file, from the text of a file of secrets.

    Args:
        source: the name of the file of secrets, for errors.

    Raises:
        ConfigError: the text contains no secrets.
    """
    written = [f"# Keys of the {member} of a Baton cluster. Private: only its processes may read this file."]
    for number, words in _lines(text):
        if len(words) != 1:
            raise ConfigError(f"line {number} of {source} is no secret: keys are derived from secrets alone")
        try:
            derived = _derive(words[0])
        except ValueError as error:
            raise ConfigError(f"line {number} of {source} is no secret: {_reason(error)}") from None
        written.append(f"private {member} {_text(derived[member].private_bytes_raw())}")
        written += [f"public {each} {_text(key.public_key().public_bytes_raw())}" for each, key in derived.items()]
    if len(written) == 1:
        raise ConfigError(f"{source} has no secret")
    return "\n".join(written) + "\n"


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            yield number, words


def _derive(secret: str) -> dict[Principal, Ed25519PrivateKey]:
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ValueError(f"it has fewer than {MIN_SECRET_CHARACTERS} characters")
    return {
        member: Ed25519PrivateKey.from_private_bytes(
            HKDF(algorithm=SHA256(), length=32, salt=_SALT, info=member.encode()).derive(secret.encode())
        )
        for member in Principal
    }


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _reason(error: ValueError) -> str:
    """Return the reason in words that quote nothing of the file."""
    if isinstance(error, binascii.Error) or "unpack" in str(error) or "is not a valid Principal" in str(error):
        return "it has another form"
    return str(error)
