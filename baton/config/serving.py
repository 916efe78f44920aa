"""Settings of the routers, of the objectives that requests are held to, and of the index in Redis."""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import Annotated, TypeAlias

from pydantic import Field

from baton.config.secrets import HIDDEN, password_of, read_password, with_password, without_password
from baton.config.section import (
    COMMA_SEPARATED,
    JSON,
    NUMBER,
    ON_OFF,
    SECRET,
    AtLeastOne,
    Float,
    HostPort,
    Int,
    Must,
    OneOf,
    Secret,
    String,
    Switch,
    section,
)
from baton.errors import ConfigError

POSITIVE = Must("an objective must be more than 0, got {field} {value}")
NOT_NEGATIVE = Must("{field} must be at least 0, got {value}")
Milliseconds: TypeAlias = Annotated[float, Field(gt=0), NUMBER, POSITIVE]
Weight: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER, NOT_NEGATIVE]
DEFAULT_CLASS = "default"


@section("index")
class IndexConfig:
    """The index of cached prefixes and the leases of the processes, both kept in Redis."""

    redis_url: Annotated[HostPort, SECRET] = field(default="", repr=False)
    """redis://[USER:PASSWORD@]HOST:PORT/DB, rediss://... (TLS) or unix://PATH. Empty: `baton up` starts an embedded
    one. A password in it does not go to workers through Ray: they have it from `redis_password_file`, or from
    BATON_INDEX_REDIS_URL in the environment of their Ray node. For workers of this machine `baton up` writes the file
    by itself."""
    redis_password_file: String = ""
    """File that holds Redis's password, instead of the one in `redis_url`. Every process reads it when it starts, so it
    has the same path on every machine."""
    lease_s: Float = 10.0
    """Duration of a lease. A process that has not renewed its lease for this long counts as gone."""
    renew_s: Float = 1.0
    """Interval at which leases are renewed."""
    blocks_ttl_s: Float = 60.0
    """Time after which the block set of a dead worker is deleted."""
    stream_max_events: Int = 100_000
    """Events in the stream of index changes that Redis keeps; a router that falls behind catches up from them."""
    poll_s: Float = 1.0
    """Interval at which a router reads the leases."""

    @property
    def url(self) -> str:
        """The URL of Redis with its password, to be connected to and not to be shown.

        Raises:
            ConfigError: the password's file cannot be read, or the password is not known here.
        """
        if self.redis_password_file:
            return with_password(self.redis_url, read_password(self.redis_password_file))
        if password_of(self.redis_url) == HIDDEN:
            raise ConfigError(
                f"the password of Redis at {self.redis_url} is not known on this Ray node: set "
                "index.redis_password_file, or BATON_INDEX_REDIS_URL in the environment of `ray start`"
            )
        return self.redis_url

    def for_workers(self) -> IndexConfig:
        """What Ray may hold of it."""
        return replace(self, redis_url=without_password(self.redis_url))


@section()
class SloClassConfig:
    """Objectives of the requests of one class, and the weights of their placement."""

    ttft_ms: Milliseconds = 60_000.0
    """Objective for the time to first token, in milliseconds. A request is refused if it is predicted to miss it
    because of the requests ahead of it."""
    itl_ms: Milliseconds = 1_000.0
    """Objective for the mean time between tokens, in milliseconds. It limits how much of other prompts a worker
    computes in one step."""
    e2e_ms: Milliseconds = math.inf
    """Objective for the time to the last token, in milliseconds; .inf: none. It counts for goodput and refuses no
    request."""
    affinity_weight: Weight = 1.0
    """Penalty for leaving a cached prefix: per token cached on another worker but not on the chosen one, as a multiple
    of the time to compute that token. It keeps conversations together, so that the pool's caches hold fewer copies."""
    interference_weight: Weight = 0.02
    """Penalty for computing a prompt where others decode: per sequence that the worker decodes, as a multiple of the
    time to compute the prompt."""


@section("router")
class RouterConfig:
    """A router: admission, placement and retries."""

    id: String = "router-0"
    """Name of the router in Redis and in traces."""
    mode: Annotated[str, OneOf("auto", "disaggregated", "aggregated")] = "auto"
    """auto, disaggregated (always prefill on a prefill worker) or aggregated (always on the decode worker)."""
    max_in_flight: AtLeastOne = 512
    """Choices served at a time; further requests are refused."""
    max_connections: AtLeastOne = 8192
    """Connections of all clients, of HTTP and of gRPC each; further ones of HTTP get 503, of gRPC are closed. gRPC
    never takes more than half of the files that the process may open."""
    max_connections_per_client: AtLeastOne = 1024
    """HTTP connections from one address. All clients behind one proxy have its address."""
    max_streams_per_client: AtLeastOne = 1024
    """Requests in progress of one client: on one gRPC connection, where further ones wait at the client, and from one
    address over HTTP, where they get 429."""
    stall_s: Annotated[float, Field(gt=0), NUMBER, Must.be("more than 0 seconds")] = 30.0
    """Time after which a client is ended that does not read its answer, or over HTTP, sends nothing of a body that it
    has begun. An answer that is not read takes its place among `max_in_flight` only until its last token is computed,
    and while requests are refused, or wait, for want of places, for 5 seconds."""
    max_attempts: AtLeastOne = 4
    """Consecutive failed attempts, with almost no progress in between, before the client gets the error."""
    drain_timeout_s: Float = 5.0
    """Time that requests in flight have to finish when the router ends."""
    max_connection_age_s: Annotated[float, Field(gt=0), NUMBER, Must.be("more than 0 seconds")] = math.inf
    """Age at which a gRPC client is asked to reconnect; calls in progress continue. Behind a load balancer of
    connections this spreads clients over all routers, and moves them off one that shuts down; .inf: never."""
    worker_wait_s: Float = 30.0
    """Longest wait of an accepted request for a worker to become ready. A router that has lost all workers still
    reports itself ready for this long."""
    pull_above_tokens: AtLeastOne = 64
    """Tokens by which another worker's cached prefix must be longer than that of the worker that computes the prompt,
    before it is pulled. A number above the context window: never."""
    slo_classes: Annotated[dict[str, SloClassConfig], JSON] = field(
        default_factory=lambda: {DEFAULT_CLASS: SloClassConfig()}
    )
    """SLO classes by name; JSON in the environment. A tenant names its class (`router.admission.tenants`); one
    without a class gets `default`. A request's own `slo` wins over its class."""
    expected_output_floor: AtLeastOne = 64
    """Fewest answer tokens for which a decode worker must have room before a prompt is computed. The estimate itself
    is the 90th percentile of the tenant's answers so far, and never more than the request allows."""
    expected_output_default: AtLeastOne = 256
    """Answer tokens that are assumed before a tenant's first answer, and reserved within its limits of tokens where a
    request names no length."""
    default_max_tokens: Int = 0
    """Answer length when a client gives none; 0: up to the context window."""
    cache_secret: Secret = field(default="", repr=False)
    """Secret that keys the tenants' cache scopes; equal on all routers. `baton up` draws one."""
    tenants_file: String = ""
    """YAML file of the tenants and the SHA-256 of their API keys (`printf %s KEY | sha256sum`);
    `router.admission.tenants` lists the fields. It is read again when it changes: a key that is added or withdrawn
    holds within 2 s. Empty: every request is accepted, whatever key it carries."""
    strict: Switch = False
    """Whether routers refuse every field that no API knows. If not, they ignore such a field if it cannot change the
    answer: null, an id, a mark for a cache (docs/http.md); the header x-baton-ignored names it. A tenant may have a
    rule of its own (`strict` in the tenants' file)."""
    allowed_hosts: Annotated[tuple[str, ...], COMMA_SEPARATED] = ()
    """Names of hosts that HTTP requests may name, beside IP addresses, names of one word, `cluster.host`,
    `cluster.advertise_host` and this machine's name; * stands for anything. Others are refused (421). Empty: all are
    answered, but for requests over loopback where no tenants are configured: a website that has its name lead to a
    laptop cannot ask the laptop's router in its visitor's name."""
    cors_origins: Annotated[tuple[str, ...], COMMA_SEPARATED] = ()
    """Websites whose pages may ask this router from a browser, such as https://chat.example; * stands for anything.
    Empty: no other website's page may."""
    keep_alive_s: Annotated[float, Field(gt=0), NUMBER, Must.be("more than 0 seconds")] = 5.0
    """Time after which an HTTP connection without a request is closed. Behind a load balancer that keeps connections it
    has to be longer than the balancer's own time, or requests fail now and then."""
    tls_certificate: String = ""
    """PEM file of the certificate that clients see, on both ports. Empty: `cluster.tls_certificate`; without that,
    clients speak plain text. It and the other files are read again when they change."""
    tls_key: String = ""
    """PEM file of that certificate's key, without a password."""
    tls_client_certificates: Annotated[str, OneOf("off", "optional", "required"), ON_OFF] = "off"
    """Whether clients present certificates: off, optional (over HTTP they may; gRPC cannot ask without insisting) or
    required (all but probes and what else needs no API key). One that a tenant lists (`certificates` in the tenants'
    file) stands for its API key."""
    tls_client_ca: String = ""
    """PEM file of the authorities that sign clients' certificates. Empty: `cluster.tls_ca`."""
    usage_log: String = ""
    """File to which a line of JSON is appended for each request that was answered: whose it was and how many tokens it
    used, never its text nor its key. Empty: none."""

    moderation: String = ""
    """Function that judges answers, as MODULE:FUNCTION; docs/moderation.md says what it gets and returns. Empty:
    answers are not judged."""
    moderation_tokens: AtLeastOne = 32
    """Tokens of an answer from one verdict to the next. They wait in the router until it has come."""
    moderation_timeout_s: Annotated[float, Field(gt=0), NUMBER, Must.be("more than 0 seconds")] = 5.0
    """Longest wait for a verdict."""
    moderation_on_failure: Annotated[str, OneOf("end", "pass")] = "end"
    """What becomes of an answer when the function raises or does not answer in time: end (it ends there, as after a
    veto) or pass (it is shown so far)."""

    def __post_init__(self) -> None:
        if DEFAULT_CLASS not in self.slo_classes:
            raise ConfigError(f"router.slo_classes must have a class {DEFAULT_CLASS!r}")

    def slo_class(self, name: str) -> SloClassConfig:
        """Raises ConfigError for a name that is not among `slo_classes`; "" is the default one."""
        if (found := self.slo_classes.get(name or DEFAULT_CLASS)) is None:
            raise ConfigError(f"no SLO class is called {name!r}; router.slo_classes has {', '.join(self.slo_classes)}")
        return found
