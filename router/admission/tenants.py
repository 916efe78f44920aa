"""Tenants. A request belongs to the tenant whose API key it carries.

The tenants stand in one YAML file (`router.tenants_file`), read once at start:

    acme:
      key_sha256: [HASH, HASH]         # two keys: how one replaces another without a gap
      weight: 2.0
      slo_class: interactive
      max_priority: 5
    acme-batch:
      key_sha256: [HASH]
      cache_scope: acme                # shares acme's cached prefixes
    evaluation:
      key_sha256: [HASH]
      parse_special: true              # may write special tokens in its prompts
    operations:
      key_sha256: [HASH]
      operator: true                   # may change the pools

A HASH is the SHA-256 of a key, as `printf %s KEY | sha256sum` prints it. Nothing else of the key is stored, so a
reader of the file cannot ask in a tenant's name. Draw keys at random (`openssl rand -hex 32`): a short or guessable one
can be found from its hash.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from baton.errors import ConfigError, Unauthenticated

SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A client of the cluster, as its operator describes it."""

    id: str
    weight: float = 1.0
    """The tenant's share of a full cluster, against the others' weights."""
    slo_class: str = ""
    """Name of the SLO class of requests that bring no objectives of their own."""
    max_priority: int = 0
    """The highest `priority` its requests may ask for. A request that asks for none has 0, so without this no request
    jumps a queue; every tenant may ask for less than 0, to let others go first."""
    cache_scope: str = ""
    """Tenants of the same scope hit each other's cached prefixes. Empty: the tenant's own id, so that another one's
    scope can also name this tenant."""
    operator: bool = False
    """Whether it may change the pools: `baton scale`, `drain` and `role`."""
    parse_special: bool = False
    """Whether its requests may write special tokens (`parse_special`): it can forge messages of any role."""

    @property
    def scope(self) -> str:
        """The scope whose cached prefixes the tenant may hit: its cache scope, or its own id."""
        return self.cache_scope or self.id


DEFAULT_TENANT = Tenant(id="default", operator=True, parse_special=True)
"""Everybody, where no tenants are configured."""


class TenantBook:
    """Finds the tenant of an API key."""

    def __init__(self, by_digest: Mapping[bytes, Tenant] | None) -> None:
        """Args:
        by_digest: SHA-256 of a key -> whose it is; None: everybody is `DEFAULT_TENANT`.
        """
        self._by_digest = by_digest

    @staticmethod
    def open_to_all() -> TenantBook:
        return TenantBook(None)

    @staticmethod
    def configured(tenants_file: str) -> TenantBook:
        """What `router.tenants_file` asks for."""
        return TenantBook.load(Path(tenants_file)) if tenants_file else TenantBook.open_to_all()

    @staticmethod
    def load(path: Path) -> TenantBook:
        """Reads the tenants' file.

        Raises:
            ConfigError: it cannot be read, or an entry is wrong; the message names it.
        """
        try:
            text = path.read_text()
            root = yaml.compose(text, yaml.SafeLoader)
            entries = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read the tenants' file {path}: {error}") from error
        if not isinstance(entries, dict) or not entries:
            raise ConfigError(f"{path} must hold tenants, such as 'acme: {{key_sha256: [...]}}'")
        assert isinstance(root, yaml.MappingNode)
        names = Counter(str(name.value) for name, _ in root.value)  # the dict has the last of each only
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ConfigError(f"{path}: tenant {repeated[0]!r} is listed twice")
        by_digest: dict[bytes, Tenant] = {}
        for tenant_id, fields in entries.items():
            tenant, digests = _entry(tenant_id, fields, f"{path}: tenant {tenant_id!r}")
            for digest in digests:
                if (owner := by_digest.setdefault(digest, tenant)) is not tenant:
                    raise ConfigError(f"{path}: tenants {owner.id!r} and {tenant.id!r} have a key in common")
        return TenantBook(by_digest)

    @property
    def slo_classes(self) -> set[str]:
        """The classes that tenants name."""
        return {tenant.slo_class for tenant in (self._by_digest or {}).values()}

    def identify(self, api_key: str | None) -> Tenant:
        """The tenant of an API key.

        The look-up needs no constant-time comparison: it compares digests, so its timing reveals at most a part
        of a digest, from which no key follows.

        Raises:
            Unauthenticated: the key is no tenant's, or there is none.
        """
        if self._by_digest is None:
            return DEFAULT_TENANT
        if not api_key:
            raise Unauthenticated("an API key is needed: send the header 'Authorization: Bearer KEY'")
        tenant = self._by_digest.get(hashlib.sha256(api_key.encode(errors="surrogateescape")).digest())
        if tenant is None:
            raise Unauthenticated("the API key is not one of this cluster's tenants; check it, or ask the operator")
        return tenant


def api_key_of(headers: Iterable[tuple[str | bytes, str | bytes]]) -> str | None:
    """The key in a request's headers, or in a call's metadata: `authorization: Bearer KEY`, else `x-api-key: KEY`.

    Args:
        headers: their names in lower case.
    """
    other = None
    for name, value in headers:
        if name in ("authorization", b"authorization"):
            scheme, _, key = _text(value).strip().partition(" ")
            if scheme.lower() == "bearer":
                return key.strip()
        elif name in ("x-api-key", b"x-api-key"):
            other = _text(value).strip()
    return other


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")


def _entry(tenant_id: object, fields: object, where: str) -> tuple[Tenant, list[bytes]]:
    """One tenant of the file, and the digests of its keys."""
    if not _is_word(tenant_id) or not tenant_id:
        raise ConfigError(f"{where}: the id must be a string of printable characters")
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} must be a section with key_sha256")
    for name, value in fields.items():
        if name not in CHECKS:
            raise ConfigError(f"{where}: unknown field {name!r}; known here: {', '.join(sorted(CHECKS))}")
        is_right, wanted = CHECKS[name]
        if not is_right(value):
            raise ConfigError(f"{where}: {name} must be {wanted}")
    if "key_sha256" not in fields:
        raise ConfigError(f"{where}: key_sha256 is missing")
    settings = {name: value for name, value in fields.items() if name != "key_sha256"}
    return Tenant(id=str(tenant_id), **settings), [bytes.fromhex(digest) for digest in fields["key_sha256"]]


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_between(value: object, low: float, high: float, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high  # type: ignore[operator]


def _are_digests(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(d, str) and SHA256.fullmatch(d) for d in value)


CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "key_sha256": (_are_digests, "a list of one or more of what `printf %s KEY | sha256sum` prints: 64 digits, quoted"),
    "weight": (lambda value: _is_between(value, 0.001, 1000, int, float), "a number from 0.001 to 1000"),
    "slo_class": (_is_word, "a string of printable characters"),
    "max_priority": (lambda value: _is_between(value, 0, 2**31 - 1, int), "a whole number from 0 to 2147483647"),
    "cache_scope": (_is_word, "a string of printable characters"),
    "operator": (lambda value: isinstance(value, bool), "true or false"),
    "parse_special": (lambda value: isinstance(value, bool), "true or false"),
}
"""The fields of a tenant -> what they may be. Values are not quoted back: one of them may be a key."""
