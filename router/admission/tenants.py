"""Tenants. A request belongs to the tenant whose API key it carries.

One YAML file lists the tenants (`router.tenants_file`). Routers reload it when it changes (`TenantsFile`):

    acme:
      key_sha256: [HASH, HASH]         # two keys, to rotate a key without a gap
      requests_per_minute: 600
      tokens_per_minute: 200000        # prompts and answers
      tokens_per_day: 20000000
      max_in_flight: 16                # concurrent answers
      max_answer_tokens: 4096          # longest answer
      weight: 2.0
      slo_class: interactive
      max_priority: 5
      models: ["llama-*", poet]        # names that it may request; * stands for any text
      model_limits:                    # in addition to the limits over all models
        llama-70b: {requests_per_minute: 60, max_in_flight: 4}
        "llama-*": {tokens_per_day: 10000000}     # each model has the limits of the first pattern that matches it
    acme-batch:
      key_sha256: [HASH]
      cache_scope: acme                # shares acme's cached prefixes
    evaluation:
      key_sha256: [HASH]
      parse_special: true              # may write special tokens in its prompts
    operations:
      key_sha256: [HASH]
      operator: true                   # may see and change the cluster
    archive:
      certificates: ["DNS:archive.example", "URI:spiffe://example/archive"]   # instead of keys, or in addition

The name of a certificate is DNS:, URI:, email: or IP: with a subject alternative name, or CN: with the subject's common
name (`router.tls_client_certificates`).

A HASH is the SHA-256 of a key, as `printf %s KEY | sha256sum` prints it. Only the hash is stored, so a reader of the
file cannot send requests as a tenant. Generate keys at random (`openssl rand -hex 32`): a short or guessable key can be
found from its hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import yaml

from baton.config import RouterConfig, why_unreadable
from baton.errors import ConfigError, Forbidden, Unauthenticated
from baton.telemetry.instruments import Instruments
from router.admission.limits import LIMITS, MAX_PATTERN, MAX_PATTERNS, Limits, match_any, matches, tighter

logger = logging.getLogger(__name__)
CERTIFICATE = re.compile(r"(DNS|URI|email|IP|CN):[^\s].*")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
MAX_LIMIT = 10**12
NO_LIMITS = Limits()
OTHER_NAMES = frozenset(("x-api-key", b"x-api-key", "api-key", b"api-key"))
POLL_S = 0.5
"""Pause between two reads of the tenants' file; a change takes effect after two reads."""
UNREADABLE = b"unreadable"
"""Version of a tenants' file that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant(Limits):
    """A client of the cluster, as its operator describes it, with its limits over all models."""

    id: str
    weight: float = 1.0
    """The tenant's share of a full cluster, against the others' weights."""
    slo_class: str = ""
    """SLO class of requests that set no objectives."""
    max_priority: int = 0
    """Highest `priority` that its requests may set. The default priority is 0, so a request can jump the queue only if
    this is positive. Every tenant may set a negative priority, to let others go first."""
    cache_scope: str = ""
    """Tenants of the same scope can hit each other's cached prefixes. Empty: the tenant's own id, so another tenant can
    share this tenant's prefixes by naming it as its scope."""
    operator: bool = False
    """True if it may see and change the cluster, through the `Admin` service and the web page."""
    parse_special: bool = False
    """True if its requests may set `parse_special`, with which a prompt can forge messages of any role."""
    strict: bool | None = None
    """True if unknown fields in its HTTP requests are refused; None: `router.strict` applies."""
    models: tuple[str, ...] = ()
    """Patterns of the names of models and adapters that it may list and request; empty: all. See `matches`."""
    model_limits: tuple[tuple[str, Limits], ...] = ()
    """Pattern of models' names -> limits for each of these models, in addition to the limits over all models. The first
    pattern that matches a name applies."""

    @property
    def scope(self) -> str:
        """Scope whose cached prefixes the tenant may hit: its cache scope, or its own id."""
        return self.cache_scope or self.id

    def may_use(self, name: str) -> bool:
        """Return whether the tenant may request the model or adapter of this name."""
        return not self.models or match_any(self.models, name)

    def limits_of(self, model: str) -> Limits:
        """Return the limits for one model, which apply in addition to those over all models."""
        return next((limits for pattern, limits in self.model_limits if matches(pattern, model)), NO_LIMITS)

    def tightest(self, model: str) -> Limits:
        """Return each limit as the lower one of two: over all models, and for one model."""
        return tighter(self, self.limits_of(model)) if self.model_limits else self


DEFAULT_TENANT = Tenant(id="default", operator=True, parse_special=True)
"""The tenant of all clients if no tenants are configured."""


class TenantBook:
    """Index of tenants by API key and certificate. A changed file replaces its content while the router runs."""

    def __init__(
        self,
        by_digest: Mapping[bytes, Tenant] | None,
        version: bytes = b"",
        by_certificate: Mapping[str, Tenant] = MappingProxyType({}),
    ) -> None:
        """Args:
        by_digest: SHA-256 of a key -> its tenant; None: every client is `DEFAULT_TENANT`.
        by_certificate: name in a client's certificate -> its tenant.
        version: digest of the file's content, see `version_of`.
        """
        self._by_digest = by_digest
        self._by_certificate = by_certificate
        self.version = version

    @staticmethod
    def open_to_all() -> TenantBook:
        return TenantBook(None)

    @staticmethod
    def configured(tenants_file: str) -> TenantBook:
        """Load `router.tenants_file`; without one, return a book that is open to all."""
        return TenantBook.load(Path(tenants_file)) if tenants_file else TenantBook.open_to_all()

    @staticmethod
    def load(path: Path) -> TenantBook:
        """Read the tenants' file.

        Raises:
            ConfigError: the file cannot be read, or an entry is invalid; the message names it.
        """
        try:
            text = path.read_bytes()
            root = yaml.compose(text, yaml.SafeLoader)
            entries = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read the tenants' file {path}: {why_unreadable(error)}") from None
        if not isinstance(entries, dict) or not entries:
            raise ConfigError(f"{path} must hold tenants, such as 'acme: {{key_sha256: [...]}}'")
        assert isinstance(root, yaml.MappingNode)
        _refuse_repeated(root, str(path))
        by_digest: dict[bytes, Tenant] = {}
        by_certificate: dict[str, Tenant] = {}
        for tenant_id, fields in entries.items():
            tenant, digests, shown = _entry(tenant_id, fields, f"{path}: tenant {tenant_id!r}")
            for digest in digests:
                if (owner := by_digest.setdefault(digest, tenant)) is not tenant:
                    raise ConfigError(f"{path}: tenants {owner.id!r} and {tenant.id!r} have a key in common")
            for name in shown:
                if (owner := by_certificate.setdefault(name, tenant)) is not tenant:
                    raise ConfigError(f"{path}: tenants {owner.id!r} and {tenant.id!r} both have {name!r}")
        return TenantBook(by_digest, version_of(text), by_certificate)

    @property
    def is_open(self) -> bool:
        """True if no tenants are configured, so every client is admitted."""
        return self._by_digest is None

    def adopt(self, other: TenantBook) -> None:
        """Replace the content by that of another book, for all requests that arrive from now on."""
        self._by_digest, self._by_certificate = other._by_digest, other._by_certificate
        self.version = other.version

    @property
    def slo_classes(self) -> set[str]:
        """SLO classes that tenants name."""
        tenants = (*(self._by_digest or {}).values(), *self._by_certificate.values())
        return {tenant.slo_class for tenant in tenants}

    @property
    def knows_certificates(self) -> bool:
        """True if a tenant has certificates."""
        return bool(self._by_certificate)

    def identify(self, api_key: str | None, certificate: Iterable[str] = ()) -> Tenant:
        """Return the tenant of an API key or, if the client sends none, of its certificate.

        The look-up needs no constant-time comparison. It compares digests, so its timing reveals at most a part of a
        digest, from which no key follows.

        Args:
            certificate: the names in the client's verified certificate.

        Raises:
            Unauthenticated: no tenant has this key; or there is no key, and the certificate does not name exactly one
                tenant.
        """
        if self._by_digest is None:
            return DEFAULT_TENANT
        if not api_key:
            found = {tenant.id: tenant for name in certificate if (tenant := self._by_certificate.get(name))}
            if len(found) == 1:
                return found.popitem()[1]
            raise Unauthenticated("an API key is needed: send the header 'Authorization: Bearer KEY'")
        tenant = self._by_digest.get(hashlib.sha256(api_key.encode(errors="surrogateescape")).digest())
        if tenant is None:
            raise Unauthenticated("the API key is not one of this cluster's tenants; check it, or ask the operator")
        return tenant


class TenantsFile:
    """Keeps `book` up to date with `router.tenants_file`: reloads the file when it changes.

    So adding or revoking a key needs no restart. Changes are detected by content, not by time stamp or inode:
    Kubernetes swaps a symlink two folders above a mounted Secret, editors write in place, and tools rename a new file
    over the old one. New content is adopted after it was read twice in a row, so a half-written file is not. An invalid
    file changes nothing: the previous entries stay in force.
    """

    def __init__(self, config: RouterConfig, book: TenantBook, instruments: Instruments) -> None:
        self._config = config
        self._path = Path(config.tenants_file)
        self._book = book
        self._instruments = instruments
        self._seen = self._settled = book.version

    @staticmethod
    def load(config: RouterConfig) -> TenantBook:
        """Return the configured tenants.

        Raises:
            ConfigError: the file cannot be read, an entry is invalid, or names an unknown SLO class.
        """
        book = TenantBook.configured(config.tenants_file)
        for slo_class in book.slo_classes:
            config.slo_class(slo_class)
        return book

    async def run(self) -> None:
        """Poll the file until cancelled. Return at once if none is configured."""
        while self._config.tenants_file:
            await asyncio.sleep(POLL_S)
            await self.poll()

    async def poll(self) -> None:
        """Read the file once, in a thread: its disk may be slow, and its parsing long."""
        version = await asyncio.to_thread(_version_at, self._path)
        is_stable, self._seen = version == self._seen, version
        if not is_stable or version == self._settled:
            return
        self._settled = version
        try:
            book = await asyncio.to_thread(self.load, self._config)
        except ConfigError as error:
            logger.error("the tenants' file is invalid; the previous entries stay in force: %s", error)
            self._instruments.tenants_file_reads.add(1, {"outcome": "refused"})
            return
        self._settled = book.version
        self._book.adopt(book)
        logger.info("the tenants' file has changed; its entries are in force")
        self._instruments.tenants_file_reads.add(1, {"outcome": "adopted"})


def require_operator(tenant: Tenant) -> None:
    """Raise Forbidden for a tenant that is not an operator."""
    if not tenant.operator:
        raise Forbidden(f"tenant {tenant.id!r} may not see or change the cluster; use an operator's API key")


def version_of(text: bytes) -> bytes:
    """Return a digest of the content of a tenants' file."""
    return hashlib.blake2b(text, digest_size=16).digest()


def _version_at(path: Path) -> bytes:
    try:
        return version_of(path.read_bytes())
    except OSError:
        return UNREADABLE


def api_key_of(headers: Iterable[tuple[str | bytes, str | bytes]]) -> str | None:
    """Return the API key in a request's headers or a call's metadata.

    This is `authorization: Bearer KEY`, else `x-api-key: KEY`, or `api-key: KEY`, which clients of Azure send.

    Args:
        headers: pairs of a name in lower case and a value.
    """
    other = None
    for name, value in headers:
        if name in ("authorization", b"authorization"):
            scheme, _, key = _text(value).strip().partition(" ")
            if scheme.lower() == "bearer":
                return key.strip()
        elif name in OTHER_NAMES:
            other = _text(value).strip()
    return other


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")


def _entry(tenant_id: object, fields: object, where: str) -> tuple[Tenant, list[bytes], list[str]]:
    """Parse one tenant of the file; return it with the digests of its keys and the names in its certificates."""
    if not _is_word(tenant_id) or not tenant_id:
        raise ConfigError(f"{where}: the id must be a string of printable characters")
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} must be a section with key_sha256")
    _check(fields, CHECKS, where)
    if not fields.keys() & PROOFS:
        raise ConfigError(f"{where}: key_sha256 is missing")
    settings = {name: value for name, value in fields.items() if name not in PROOFS}
    settings["models"] = tuple(fields.get("models", ()))
    settings["model_limits"] = tuple(
        (pattern, _limits(limits, f"{where}: model_limits of {pattern!r}"))
        for pattern, limits in fields.get("model_limits", {}).items()
    )
    digests = [bytes.fromhex(digest) for digest in fields.get("key_sha256", ())]
    return Tenant(id=str(tenant_id), **settings), digests, fields.get("certificates", [])


def _limits(fields: object, where: str) -> Limits:
    """Parse the limits for one model."""
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} must be a section with limits, such as {{requests_per_minute: 60}}")
    _check(fields, LIMIT_CHECKS, where)
    return Limits(**fields)


def _check(fields: Mapping[object, object], checks: Mapping[str, Check], where: str) -> None:
    """Raise ConfigError unless all fields are known and their values valid."""
    for name, value in fields.items():
        if not isinstance(name, str) or name not in checks:
            raise ConfigError(f"{where}: unknown field {name!r}; known here: {', '.join(sorted(checks))}")
        is_right, wanted = checks[name]
        if not is_right(value):
            raise ConfigError(f"{where}: {name} must be {wanted}")


def _refuse_repeated(root: yaml.MappingNode, path: str) -> None:
    """Raise ConfigError if a tenant or a pattern of `model_limits` is listed twice: YAML keeps the last one only."""
    for tenant, fields in _once(root, f"{path}: tenant"):
        for name, limits in fields.value if isinstance(fields, yaml.MappingNode) else ():
            if name.value == "model_limits" and isinstance(limits, yaml.MappingNode):
                _once(limits, f"{path}: tenant {tenant.value!r}: model_limits of")


def _once(section: yaml.MappingNode, what: str) -> Sequence[tuple[yaml.Node, yaml.Node]]:
    """Return the entries of a section. Raise ConfigError if two of them have the same name."""
    entries: Sequence[tuple[yaml.Node, yaml.Node]] = section.value
    names = Counter(str(name.value) for name, _ in entries)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"{what} {repeated[0]!r} is listed twice")
    return entries


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_between(value: object, low: float, high: float, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high  # type: ignore[operator]


def _are_digests(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(d, str) and SHA256.fullmatch(d) for d in value)


def _are_names(value: object) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(n, str) and CERTIFICATE.fullmatch(n) for n in value)
    )


def _is_pattern(value: object) -> bool:
    return _is_word(value) and 0 < len(str(value)) <= MAX_PATTERN


def _are_patterns(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MAX_PATTERNS and all(map(_is_pattern, value))


def _are_some_patterns(value: object) -> bool:
    return _are_patterns(value) and bool(value)


def _is_by_pattern(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= MAX_PATTERNS and all(map(_is_pattern, value))


Check = tuple[Callable[[object], bool], str]
"""Check of a value, and description of valid values."""
PROOFS = {"key_sha256", "certificates"}
"""Fields that authenticate a tenant; each tenant has at least one of them."""
LIMIT_CHECKS: dict[str, Check] = dict.fromkeys(
    LIMITS, (lambda value: _is_between(value, 1, MAX_LIMIT, int), f"a whole number from 1 to {MAX_LIMIT}")
)
"""Name of a limit -> its check."""
PATTERNS = f"at most {MAX_PATTERNS} patterns of models' names, each of 1 to {MAX_PATTERN} printable characters"
CHECKS: dict[str, Check] = {
    "key_sha256": (_are_digests, "a list of one or more of what `printf %s KEY | sha256sum` prints: 64 digits, quoted"),
    "certificates": (
        _are_names,
        "a list of names in certificates, each after its kind: DNS:, URI:, email:, IP: or CN:",
    ),
    "weight": (lambda value: _is_between(value, 0.001, 1000, int, float), "a number from 0.001 to 1000"),
    "slo_class": (_is_word, "a string of printable characters"),
    "max_priority": (lambda value: _is_between(value, 0, 2**31 - 1, int), "a whole number from 0 to 2147483647"),
    "cache_scope": (_is_word, "a string of printable characters"),
    "operator": (lambda value: isinstance(value, bool), "true or false"),
    "strict": (lambda value: isinstance(value, bool), "true or false"),
    "parse_special": (lambda value: isinstance(value, bool), "true or false"),
    "models": (_are_some_patterns, f"a list of {PATTERNS}; leave it out to allow all models"),
    "model_limits": (_is_by_pattern, f"a section of limits by {PATTERNS}"),
    **LIMIT_CHECKS,
}
"""Field of a tenant -> check and description of valid values. Errors do not quote values, which may be keys."""
