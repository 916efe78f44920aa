"""Checks of a running cluster, through a router, the routers' metrics and Redis."""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator, Mapping

from baton.cluster import with_role
from baton.config import Config, without_password
from baton.errors import BatonError, Forbidden, InvalidRequest, NoWorker, Unauthenticated
from baton.tls import member_tls
from deploy.doctor import endpoints, redis
from deploy.doctor.checks import Check, guarded, judged, names
from deploy.doctor.machine import hostname
from deploy.doctor.reach import Target, reachability, takes_anybody, wrongly_announced
from deploy.extras import DISTRIBUTION
from deploy.operator.client import Access, Client, StatusJson, metadata_of
from deploy.operator.scrape import Samples, Scraper, http_connection, seen_from
from deploy.operator.tables import computes_of

LAG_S = 2.0
"""Mirror lag above which a router places requests by outdated data."""
DRAIN_LOOK_S = 2.0
"""Time between two observations of a draining worker."""
HTTP_TIMEOUT_S = 2.0
NO_KEY = "none is needed"


def diagnose(config: Config, address: str, access: Access, environ: Mapping[str, str]) -> list[Check]:
    """Run the checks of a cluster. Return an empty list if no router answers."""
    client = Client(address, access.api_key, access.tls)
    try:
        status = client.status()
        checks = [Check("router", "ok", f"answers at {address}")]
        checks += guarded("drains", lambda: drains(status, client.status), "")
    except NoWorker:
        return []
    except (Unauthenticated, Forbidden) as error:
        answers = Check("router", "ok", f"answers at {address}")
        fix = "give an operator's key (--api-key or BATON_API_KEY) to run the remaining checks"
        # An unknown key is a mistake. A tenant's key, or none, shows as much as it should.
        is_unknown = bool(access.api_key) and isinstance(error, Unauthenticated)
        return [answers, Check("api key", "fail" if is_unknown else "warn", str(error), fix)]
    except BatonError as error:
        return [Check("router", "fail", str(error), f"check that {address} is the gRPC port of a Baton router")]
    finally:
        client.close()
    scraped = {router["id"]: _scraped(router["http"], address, access) for router in status["routers"]}
    metrics = next((samples for samples in scraped.values() if samples is not None), None)
    checks += metrics_seen(scraped)
    checks += versions(_versions(status, scraped), importlib.metadata.version(DISTRIBUTION))
    checks += pools(status)
    checks += workers(status)
    checks += computing(status)
    checks += mirrors(status)
    checks += _redis(config, status, metrics)
    targets = _targets(status)
    nodes = {worker["node"] for worker in status["workers"]}
    checks += wrongly_announced(targets, is_one_machine=nodes <= {hostname()})
    # From a pod every other address should be reachable.
    reached = [each for each in targets if not _is_nowhere(each)]
    checks += reachability(reached, "KUBERNETES_SERVICE_HOST" in environ)
    key = guarded("api key", lambda: _key(status, address, access), "")
    checks += key
    # A request with a key does not show whether one is required.
    asks_key = None if access.api_key or not key else key[0].found != NO_KEY
    is_open = takes_anybody(config.index.redis_url or status["redis"]["address"])
    checks += endpoints.checks(endpoints.announced(endpoints.configured(config, environ, is_open), status, asks_key))
    return checks


def metrics_seen(scraped: Mapping[str, Samples | None]) -> Iterator[Check]:
    lost = [router for router, samples in scraped.items() if samples is None]
    yield judged(
        "metrics",
        not lost,
        f"of {len(scraped)} routers" if not lost else f"cannot be read from {names(lost)}",
        "check that this machine can reach the HTTP port",
        "warn",
    )


def versions(found: Mapping[str, str], ours: str) -> Iterator[Check]:
    """Args:
    found: process -> its version, of the processes that report one.
    ours: version of the distribution that this command is from.
    """
    several = redis.by_value((who, version) for who, version in found.items())
    if len(several) > 1:
        yield Check(
            "versions",
            "warn",
            redis.listed(several),
            "expected during an upgrade; otherwise upgrade the older ones",
        )
    elif several and ours not in several:
        yield Check(
            "versions",
            "warn",
            f"the cluster is {next(iter(several))}, this command {ours}",
            "use the command of the cluster's version: commands and fields may differ",
        )
    elif several:
        yield Check("versions", "ok", f"{ours}: this command, {names(found)}")
    else:
        yield Check(
            "versions",
            "warn",
            f"this command is {ours}; the cluster does not report its version",
            "make the router's HTTP port reachable, or upgrade the cluster to a release that reports its version",
        )


def pools(status: StatusJson) -> Iterator[Check]:
    for name, pool in status["pools"].items():
        yield judged(
            f"pool {name}",
            pool["ready"] >= pool["desired"],
            f"{pool['ready']} of {pool['desired']} ready",
            "check that its nodes have room (GPUs, memory, Pending pods); the controller's log names failed starts",
            "warn",
        )
    controller = status.get("controller")
    yield judged(
        "controller",
        bool(controller),
        controller["address"] if controller else "none is known",
        "until it runs again, dead workers are not replaced, and pools cannot be changed: see its log",
        "warn",
    )


def workers(status: StatusJson) -> Iterator[Check]:
    for worker in status["workers"]:
        yield judged(
            with_role(worker["id"], worker["role"]),
            worker["self_check"] == "ok",
            worker["self_check"],
            "blocks are leaked: please report it with the worker's log",
        )


def computing(status: StatusJson) -> Iterator[Check]:
    """Check the workers' compute configuration for implementations that are slower than their devices allow."""
    slower = redis.by_value(
        (with_role(w["id"], w["role"]), reason) for w in status["workers"] for reason in computes_of(w).fallbacks
    )
    for reason, who in slower.items():
        yield Check(
            "computing",
            "warn",
            f"{reason} ({names(who)})",
            "it may be several times slower than the device allows: docs/gpu.md lists what each implementation needs, "
            "and the worker's log has the full reason",
        )
    if not slower and status["workers"]:
        found = redis.by_value((with_role(w["id"], w["role"]), computes_of(w).in_words()) for w in status["workers"])
        yield Check("computing", "ok", redis.listed(found))


def mirrors(status: StatusJson) -> Iterator[Check]:
    slow = {
        f"{router['id']} by {router['mirror_lag_s']:.1f} s"
        for router in status["routers"]
        if router["mirror_lag_s"] > LAG_S
    }
    yield judged(
        "prefix index",
        not slow,
        f"behind: {names(slow)}" if slow else "the routers' copies are current",
        "the router or its connection to Redis is overloaded: check its CPU, or add routers",
        "warn",
    )


def drains(status: StatusJson, again: Callable[[], StatusJson], wait_s: float = DRAIN_LOOK_S) -> Iterator[Check]:
    """Check for draining workers that make no progress between two observations."""

    def draining(status: StatusJson) -> dict[tuple[str, int], tuple[int, int, int]]:
        return {
            (w["id"], w["epoch"]): (w["running"], w["waiting"], w["computed_tokens"])
            for w in status["workers"]
            if w["state"] == "draining"
        }

    if not (before := draining(status)):
        return
    time.sleep(wait_s)
    after = draining(again())
    for key, progress in after.items():
        if key not in before:
            continue
        running, waiting, _ = progress
        is_stuck = before[key] == progress
        left = f"{running} running, {waiting} waiting"
        fix = (
            "a drain takes at most cluster.drain_timeout_s; if it takes longer, see the worker's log and `baton status`"
            if running or waiting
            else "it has no requests left: check that its replacement is starting, and that the controller runs"
        )
        yield judged(f"drain of {key[0]}", not is_stuck, f"{left}{', no progress' if is_stuck else ''}", fix, "warn")


def _versions(status: StatusJson, scraped: Mapping[str, Samples | None]) -> dict[str, str]:
    found = {}
    for router, samples in scraped.items():
        for sample in samples.of("baton_build_info") if samples else ():
            found[router] = sample.labels["version"]
    members = [*status["routers"], *status["workers"], *([status["controller"]] if status.get("controller") else [])]
    for member in members:
        if version := member.get("version"):
            found[member.get("id", "controller")] = version
    return found


def _scraped(announced: str, asked: str, access: Access) -> Samples | None:
    scraper = Scraper(seen_from(announced, asked), access, HTTP_TIMEOUT_S)
    try:
        return scraper.read()
    except NoWorker:
        return None
    finally:
        scraper.close()


def _redis(config: Config, status: StatusJson, metrics: Samples | None) -> Iterator[Check]:
    address, is_ok = status["redis"]["address"], status["redis"]["ok"]
    yield judged("redis", is_ok, without_password(address), "the router serves from memory; restart Redis", "warn")
    # The status may omit a password that the local configuration has.
    url = config.index.redis_url or address
    seen: redis.Look | BatonError
    try:
        seen = redis.look(config.index.url or address, member_tls(config.cluster))
    except BatonError as error:
        seen = error
    if is_ok or not isinstance(seen, BatonError):
        yield from redis.server(url, seen)
    if not isinstance(seen, BatonError):
        yield from redis.leases(seen, config.index.lease_s)
        return
    # The routers' metrics contain a part of this.
    kinds = (
        [(s.labels["worker"], s.labels["wire_compat"][:8]) for s in metrics.of("baton_worker_info")] if metrics else []
    )
    if kinds:
        yield redis.kv_kinds(redis.by_value(iter(kinds)))
    yield from redis.shapes([(w["id"], w["role"], w["block_size"], w["chunk_tokens"]) for w in status["workers"]])


def _targets(status: StatusJson) -> list[Target]:
    targets = [Target(worker["id"], worker["address"]) for worker in status["workers"]]
    for router in status["routers"]:
        targets += [Target(f"{router['id']} gRPC", router["grpc"]), Target(f"{router['id']} HTTP", router["http"])]
    if status.get("controller"):
        targets.append(Target("controller", status["controller"]["address"]))
    return targets


def _is_nowhere(target: Target) -> bool:
    return any(wrongly_announced([target], is_one_machine=True))


def _key(status: StatusJson, asked: str, access: Access) -> Iterator[Check]:
    headers = dict(metadata_of(access.api_key))
    for address in seen_from(status["routers"][0]["http"], asked):
        connection = http_connection(address, HTTP_TIMEOUT_S, access.tls)
        try:
            connection.request("GET", "/v1/models", headers=headers)
            answer = connection.getresponse()
            yield key_check(answer.status, answer.read(), bool(access.api_key))
            return
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()


def key_check(http_status: int, body: bytes, has_key: bool) -> Check:
    """Return the check of the API key, from a router's response to /v1/models."""
    if http_status == 200:
        return Check("api key", "ok", "yours is accepted" if has_key else NO_KEY)
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP status {http_status}"
    if http_status == InvalidRequest.http:
        return Check("api key", "fail", message, "see the router's log")
    return Check(
        "api key",
        "warn" if not has_key else "fail",
        message,
        "give --api-key or BATON_API_KEY: the cluster has tenants (router.tenants_file)",
    )
