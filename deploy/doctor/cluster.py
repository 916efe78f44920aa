"""Checks of a running cluster, through a router and Redis.

`baton status` shows pools, the controller, failed self-checks, slower implementations and unreadable values in Redis.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from baton.config import Config, without_password
from baton.errors import BatonError, Forbidden, InvalidRequest, NoWorker, Unauthenticated
from baton.tls import member_tls
from deploy.doctor import endpoints, redis
from deploy.doctor.checks import Check, guarded, judged, names
from deploy.doctor.machine import hostname
from deploy.doctor.reach import Target, is_loopback, reachability, wrongly_announced
from deploy.extras import DISTRIBUTION
from deploy.operator.client import Access, Client, StatusJson, metadata_of
from deploy.operator.scrape import http_connection, seen_from
from deploy.operator.tables import controllers_of, with_releases

LAG_S = 2.0
"""Mirror lag above which a router places requests by outdated data."""
DRAIN_LOOK_S = 2.0
"""Time between two observations of a draining worker."""
HTTP_TIMEOUT_S = 2.0


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
    checks += versions(_versions(status), importlib.metadata.version(DISTRIBUTION))
    checks += mirrors(status)
    checks += _redis(config, status)
    targets = _targets(status)
    nodes = {worker["node"] for worker in status["workers"]}
    checks += wrongly_announced(targets, is_one_machine=nodes <= {hostname()})
    # From a pod every other address should be reachable.
    reached = [each for each in targets if not _is_nowhere(each)]
    checks += reachability(reached, "KUBERNETES_SERVICE_HOST" in environ)
    checks += guarded("api key", lambda: _key(status, address, access), "")
    checks += endpoints.checks(config, environ, status["redis"]["address"])
    return checks


def versions(found: Mapping[str, str], ours: str) -> Iterator[Check]:
    """Args:
    found: process -> its version, of the processes that report one.
    ours: version of the distribution that this command is from.
    """
    several: dict[str, list[str]] = defaultdict(list)
    for who, version in found.items():
        several[version].append(who)
    if len(several) > 1:
        yield Check(
            "versions",
            "warn",
            "; ".join(f"{version}: {names(who)}" for version, who in sorted(several.items())),
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
            "upgrade the cluster to a release that reports its version",
        )


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


def _versions(status: StatusJson) -> dict[str, str]:
    members = {member["id"]: member for member in [*status["routers"], *with_releases(status["workers"])]}
    members |= {name: found for name, found in controllers_of(status).items() if found}
    return {name: version for name, member in members.items() if (version := member.get("version"))}


def _redis(config: Config, status: StatusJson) -> Iterator[Check]:
    address, is_ok = status["redis"]["address"], status["redis"]["ok"]
    yield judged("redis", is_ok, without_password(address), "the router serves from memory; restart Redis", "warn")
    # The status may omit a password that the local configuration has.
    try:
        facts: redis.Facts | BatonError = redis.look(config.index.url or address, member_tls(config.cluster))
    except BatonError as error:
        facts = error
    if is_ok or not isinstance(facts, BatonError):
        yield from redis.server(config.index.redis_url or address, facts)


def _targets(status: StatusJson) -> list[Target]:
    targets = [Target(worker["id"], worker["address"]) for worker in with_releases(status["workers"])]
    for router in status["routers"]:
        targets += [Target(f"{router['id']} gRPC", router["grpc"]), Target(f"{router['id']} HTTP", router["http"])]
    targets += [Target(name, found["address"]) for name, found in controllers_of(status).items() if found]
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
            yield key_check(answer.status, answer.read(), bool(access.api_key), _others(status))
            return
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()


def _others(status: StatusJson) -> list[str]:
    """Return the hosts of routers that other machines can reach."""
    hosts = {endpoints.host_of(router["grpc"]) for router in status["routers"]}
    return sorted(host for host in hosts if host and not is_loopback(host))


def key_check(http_status: int, body: bytes, has_key: bool, others: list[str]) -> Check:
    """Return the check of the API key, from a router's response to /v1/models.

    Args:
        others: the routers' hosts that other machines can reach.
    """
    if http_status == 200:
        if has_key or not others:
            return Check("api key", "ok", "yours is accepted" if has_key else "none is needed")
        fix = f"configure tenants (router.tenants_file), or {endpoints.OWN_NETWORK}"
        return Check("api key", "warn", f"none is needed: {names(others)} serves any client that can reach it", fix)
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
