"""Settings of the routers, of the SLO classes, and of the index in Redis."""

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
    WHOLE,
    AtLeastOne,
    Float,
    HostPort,
    Int,
    Must,
    OneOf,
    Port,
    Secret,
    String,
    Switch,
    section,
)
from baton.errors import ConfigError
from baton.images import MAX_IMAGE_BYTES, MAX_IMAGES

POSITIVE = Must("an objective must be more than 0, got {field} {value}")
NOT_NEGATIVE = Must("{field} must be at least 0, got {value}")
Milliseconds: TypeAlias = Annotated[float, Field(gt=0), NUMBER, POSITIVE]
Weight: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER, NOT_NEGATIVE]
DEFAULT_CLASS = "default"


@section("index")
class IndexConfig:
    """Index of cached prefixes and leases of the processes, both stored in Redis."""

    redis_url: Annotated[HostPort, SECRET] = field(default="", repr=False)
    """redis://[USER:PASSWORD@]HOST:PORT/DB, rediss://... (TLS) or unix://PATH. Empty: `baton up` starts an embedded
    Redis. A password in the URL is not sent to workers through Ray: they read it from `redis_password_file`, or from
    BATON_INDEX_REDIS_URL in the environment of their Ray node. For workers on this machine `baton up` writes that file
    itself."""
    redis_password_file: String = ""
    """File with the password of Redis, as an alternative to a password in `redis_url`. Every process reads it when it
    starts, so the path must be the same on every machine."""
    lease_s: Float = 10.0
    """Duration of a lease. A process that has not renewed its lease for this long is considered dead."""
    renew_s: Float = 3.0
    """Interval at which leases are renewed. A changed state is reported at once, and a changed load within a second. If
    the interval is more than a third of `lease_s`, a short interruption of Redis ends leases."""
    blocks_ttl_s: Float = 60.0
    """Time after which the block set of a dead worker is deleted."""
    stream_max_events: Int = 100_000
    """Number of index changes that Redis keeps in its stream; a router that falls behind catches up from it."""
    stream_max_bytes: AtLeastOne = 64 * 2**20
    """Size of that stream in bytes. It must be well below the memory limit of Redis."""
    stream_max_age_s: Annotated[float, Field(gt=0), NUMBER, Must.be("more than 0 seconds")] = 60.0
    """Age of the oldest change in that stream."""
    poll_s: Float = 1.0
    """Interval at which each router reads the leases."""

    @property
    def url(self) -> str:
        """URL of Redis with its password, for connecting only; never log or print it.

        Raises:
            ConfigError: the password's file cannot be read, or this process does not have the password.
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
        """Return these settings without the password, as Ray may store them."""
        return replace(self, redis_url=without_password(self.redis_url))


@section()
class SloClassConfig:
    """Objectives of the requests of one SLO class, and the weights of their placement."""

    ttft_ms: Milliseconds = 60_000.0
    """Objective for the time to first token, in milliseconds. A request is refused if it is predicted to miss the
    objective because of the requests ahead of it."""
    itl_ms: Milliseconds = 1_000.0
    """Objective for the mean time between tokens, in milliseconds. It limits how many tokens of other prompts a worker
    computes in one step."""
    e2e_ms: Milliseconds = math.inf
    """Objective for the time to the last token, in milliseconds; .inf: none. It counts towards goodput, and never
    causes a refusal."""
    affinity_weight: Weight = 1.0
    """Placement penalty for not using a cached prefix: per token that is cached on another worker but not on the chosen
    one, as a multiple of the time to compute that token. It keeps conversations on one worker, so that the pool's
    caches hold fewer copies."""
    interference_weight: Weight = 0.02
    """Placement penalty for computing a prompt on a worker that decodes: per decoding sequence, as a multiple of the
    time to compute the prompt."""


@section("router")
class RouterConfig:
    """Router: admission, placement and retries."""

    id: String = "router-0"
    """Name of the router in Redis and in traces."""
    own_model: Switch = True
    """Serve the model of this configuration from the start, in addition to the models that controllers announce
    (`cluster.endpoint`). If false, the router needs no model of its own."""
    default_model: String = ""
    """Model for requests that name no model. Empty: the only model; if there are several, such requests are refused."""
    max_models: Annotated[int, Field(ge=1, le=1024), WHOLE, Must.be("1 to 1024")] = 64
    """Maximum number of models that the router serves at a time; it ignores further announcements. Each needs
    memory for a tokenizer, about 100 MiB."""
    mode: Annotated[str, OneOf("auto", "disaggregated", "aggregated")] = "auto"
    """auto (decide per request), disaggregated (always prefill on a prefill worker) or aggregated (always prefill on
    the decode worker)."""
    max_in_flight: AtLeastOne = 512
    """Maximum number of choices served at a time; further requests are refused."""
    max_connections: AtLeastOne = 8192
    """Maximum number of client connections, for HTTP and for gRPC separately; further HTTP connections get 503, and
    further gRPC connections are closed. gRPC never uses more than half of the files that the process may open."""
    max_connections_per_client: AtLeastOne = 1024
    """Maximum number of HTTP connections from one address. All clients behind one proxy share its address."""
    max_streams_per_client: AtLeastOne = 1024
    """Maximum number of concurrent requests of one client: per gRPC connection, where further requests wait at the
    client, and per address over HTTP, where further requests get 429."""
    stall_s: Annotated[float, Field(gt=0), NUMBER, Must.be("more than 0 seconds")] = 30.0
    """Disconnect a client that has not read its response for this long, or that has sent nothing of an incomplete HTTP
    request body for this long. An unread response counts against `max_in_flight` only until its last token is computed.
    While the router is at capacity, a client that does not read is disconnected after 5 seconds if its response is
    still being computed."""
    max_attempts: AtLeastOne = 4
    """Maximum number of consecutive failed attempts, with almost no progress in between, before the client gets the
    error."""
    drain_timeout_s: Float = 5.0
    """Time that requests in flight have to finish when the router shuts down. Those that remain end with an error."""
    max_connection_age_s: Annotated[float, Field(gt=0), NUMBER, Must.be("more than 0 seconds")] = math.inf
    """Age at which a gRPC client is asked to reconnect; calls in progress continue. Behind a load balancer that
    balances connections, this spreads clients over all routers and moves them away from a router that shuts down. .inf:
    never."""
    worker_wait_s: Float = 30.0
    """Maximum time that an admitted request waits for a worker to become ready. A router that has lost all workers
    continues to report itself ready for this long."""
    wake_wait_s: Annotated[float, Field(gt=0), NUMBER, Must.be("more than 0 seconds")] = 300.0
    """Maximum time that an admitted request waits until a model that sleeps is awake."""
    max_held: AtLeastOne = 1000
    """Maximum number of held requests, which wait until their models are awake; further ones are refused with 503. Held
    requests do not count against `max_in_flight`. One tenant may have half of them."""
    held_bytes: AtLeastOne = 256 * 2**20
    """Maximum total size of the prompts of held requests, in bytes. One tenant may use half of it."""
    pull_above_tokens: AtLeastOne = 64
    """Minimum number of additional cached tokens that another worker's prefix must have, compared with the worker that
    computes the prompt, before it is pulled. A number above the context window disables pulling."""
    slo_classes: Annotated[dict[str, SloClassConfig], JSON] = field(
        default_factory=lambda: {DEFAULT_CLASS: SloClassConfig()}
    )
    """SLO classes by name; JSON in the environment. A tenant names its class (`router.admission.tenants`); a tenant
    without a class gets `default`. The `slo` of a request takes precedence over its class."""
    expected_output_floor: AtLeastOne = 64
    """Minimum number of output tokens for which a decode worker must have room before a prompt is computed. The
    estimate itself is the 90th percentile of the tenant's latest output lengths (of all tenants' until it has 16), and
    never more than the request allows."""
    expected_output_default: AtLeastOne = 256
    """Output length, in tokens, that a router assumes until it has seen 16 outputs. It is also the number of tokens
    reserved within a tenant's token limits if a request gives no length."""
    default_max_tokens: Int = 0
    """Maximum output length of requests that give none; 0: up to the context window."""
    cache_secret: Secret = field(default="", repr=False)
    """Secret that keys the tenants' cache scopes; it must be the same on all routers. `baton up` generates one."""
    max_images: Annotated[int, Field(ge=1, le=MAX_IMAGES), WHOLE, Must.be(f"1 to {MAX_IMAGES}")] = 16
    """Maximum number of images in a request."""
    max_image_bytes: Annotated[int, Field(ge=1, le=MAX_IMAGE_BYTES), WHOLE, Must.be(f"1 to {MAX_IMAGE_BYTES}")] = (
        20_971_520
    )
    """Maximum size of an image, as a file. The limits on a whole request apply too: 8 MiB over HTTP, with images in
    base64, and 4 MiB over gRPC."""
    image_memory_bytes: AtLeastOne = 256 * 2**20
    """Maximum size of the images of all running requests; further requests with images are refused with 429. One tenant
    may have half of it."""
    tenants_file: String = ""
    """YAML file of the tenants and the SHA-256 of their API keys (`printf %s KEY | sha256sum`);
    `router.admission.tenants` lists the fields. The file is reloaded when it changes: added and removed keys take
    effect within 2 s. Empty: every request is accepted, with any key or none."""
    strict: Switch = False
    """Refuse requests with fields that no API defines. If false, the router ignores an unknown field that cannot change
    the output, such as null, an id or a cache hint (docs/http.md), and names it in the header x-baton-ignored. A tenant
    can override this setting (`strict` in the tenants' file)."""
    allowed_hosts: Annotated[tuple[str, ...], COMMA_SEPARATED] = ()
    """Accepted `Host` headers of HTTP requests, in addition to IP addresses, single-label names, `cluster.host`,
    `cluster.advertise_host` and this machine's name; * matches any text. Requests with other hosts get 421. Empty: all
    hosts are accepted, except for requests over loopback if no tenants are configured. This exception prevents
    DNS-rebinding attacks on a router that runs on a laptop without authentication."""
    cors_origins: Annotated[tuple[str, ...], COMMA_SEPARATED] = ()
    """Origins of websites that may call this router from a browser, such as https://chat.example; * matches any text.
    Empty: no other website may call it."""
    keep_alive_s: Annotated[float, Field(gt=0), NUMBER, Must.be("more than 0 seconds")] = 5.0
    """Time after which an idle HTTP connection is closed. Behind a load balancer that reuses connections, it must be
    longer than the balancer's own idle timeout; otherwise requests fail occasionally."""
    tls_certificate: String = ""
    """PEM file of the certificate that clients see, on both ports. Empty: `cluster.tls_certificate`; if that is empty
    too, clients use plain text. The files of all these settings are reloaded when they change."""
    tls_key: String = ""
    """PEM file of the key of `tls_certificate`, without a password."""
    tls_client_certificates: Annotated[str, OneOf("off", "optional", "required"), ON_OFF] = "off"
    """Client certificates: off, optional (HTTP clients may present one; gRPC cannot request one without requiring it)
    or required (all requests except probes and others that need no API key). A certificate that a tenant lists
    (`certificates` in the tenants' file) replaces an API key."""
    tls_client_ca: String = ""
    """PEM file of the authorities that sign clients' certificates. Empty: `cluster.tls_ca`."""
    picker_port: Port = 0
    """Port of the endpoint picker; 0: off. Gateways of the Gateway API inference extension ask the picker which router
    serves a request (docs/gateway.md). It uses TLS, with a certificate that the router makes if none is configured.
    Only gateways may reach it."""
    usage_log: String = ""
    """File to which a JSON line is appended for each request that got a response: its tenant and token counts, never
    its text or key. Empty: none."""

    moderation: String = ""
    """Moderation function for outputs, as MODULE:FUNCTION; docs/moderation.md describes its arguments and result.
    Empty: no moderation."""
    moderation_tokens: AtLeastOne = 32
    """Output tokens between two verdicts of the moderation function. The router holds them back until the verdict
    arrives."""
    moderation_timeout_s: Annotated[float, Field(gt=0), NUMBER, Must.be("more than 0 seconds")] = 5.0
    """Maximum wait for a verdict."""
    moderation_on_failure: Annotated[str, OneOf("end", "pass")] = "end"
    """Handling of an output if the function raises or exceeds its timeout: end (stop the output there, as after a veto)
    or pass (release the tokens that wait)."""

    def __post_init__(self) -> None:
        if DEFAULT_CLASS not in self.slo_classes:
            raise ConfigError(f"router.slo_classes must have a class {DEFAULT_CLASS!r}")

    def slo_class(self, name: str) -> SloClassConfig:
        """Return the SLO class of this name; "" is the default class.

        Raises:
            ConfigError: `slo_classes` has no class of this name.
        """
        if (found := self.slo_classes.get(name or DEFAULT_CLASS)) is None:
            raise ConfigError(f"no SLO class is called {name!r}; router.slo_classes has {', '.join(self.slo_classes)}")
        return found
