"""LoRA adapters as routers and operators know them: registered under a name, by which clients request them.

A worker checks a folder (`CheckedAdapter`), an operator registers it (`RegisteredAdapter`), and the sequences of its
requests name it (`baton.messages.Adapter`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.errors import InvalidRequest
from baton.messages import Adapter

MAX_ADAPTERS = 10_000
"""Maximum number of registered adapters."""
MAX_NAME = 128
MAX_PATH = 1024
MAX_RANK = 2**16
CHECK_S = 60.0
"""Deadline of a worker's check of a folder, in seconds."""
DIGEST = re.compile(r"[0-9a-f]{16,64}")
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.+/:@=-]{{0,{MAX_NAME - 1}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAdapter:
    """A worker's findings about the folder of an adapter."""

    digest: str
    """Digest of its content, hexadecimal."""
    rank: int
    """Largest rank of its matrices."""
    num_bytes: int
    """Size of its matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredAdapter:
    """An adapter that is served as a model."""

    adapter: Adapter
    num_bytes: int
    since_s: float
    """Unix time at which it was registered."""

    @property
    def name(self) -> str:
        """Model name under which clients request it."""
        return self.adapter.name


Adapters = Mapping[str, RegisteredAdapter]
"""Registered adapters by name."""
NO_ADAPTERS: Adapters = MappingProxyType({})


def check_name(name: str, model_id: str) -> None:
    """Raise InvalidRequest unless an adapter may have this name.

    Args:
        model_id: name of the served model.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"the name of an adapter must have 1 to {MAX_NAME} ASCII letters, digits and _ . + / : @ = -, and start "
            f"with a letter or a digit; got {name!r:.200}",
            "name",
        )
    if name == model_id:
        raise InvalidRequest(f"{name!r} is the name of the served model; choose another name for the adapter", "name")


def check_path(path: str) -> None:
    """Raise InvalidRequest unless the path is absolute, short and printable."""
    if not path.startswith("/") or len(path) > MAX_PATH or not path.isprintable():
        raise InvalidRequest(
            f"the path of an adapter must be absolute, printable and have at most {MAX_PATH} characters; "
            f"got {path!r:.200}",
            "path",
        )


def check_facts(facts: CheckedAdapter) -> None:
    """Raise ValueError for facts that no worker finds."""
    if not DIGEST.fullmatch(facts.digest):
        raise ValueError(f"{facts.digest!r:.200} is no digest")
    if not 0 < facts.rank <= MAX_RANK or not 0 <= facts.num_bytes < 2**53:
        raise ValueError(f"rank {facts.rank} or size {facts.num_bytes} is out of range")
