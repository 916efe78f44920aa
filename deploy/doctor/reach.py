"""Whether addresses can be reached from here, and what stands between when not."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from baton.errors import ConfigError, StoreUnavailable
from deploy.doctor.checks import Check, State, names
from deploy.operator.scrape import NOWHERE, split
from kvstore.index import RedisConnection

TIMEOUT_S = 2.0
AT_ONCE = 64
MOST = 500
"""Addresses that are tried; of a bigger cluster the first."""


WILDCARD = "it advertises a wildcard address, which cannot be connected to: set cluster.advertise_host to the pod's own"


class Target(NamedTuple):
    name: str
    address: str
    """host:port."""


MENDS = {
    "timed out": "packets are dropped: a NetworkPolicy or a firewall may drop this; it has to let this pod reach that "
    "port",
    "refused": "the machine answers but nothing listens on this port: the process is gone or listens on another "
    "address (a loopback only?); a policy that rejects looks the same",
    "no route": "no network leads there: look at the CNI, or run this inside of the cluster",
    "unknown name": "DNS does not know it: does the Service exist, and may this pod ask DNS (egress to port 53)?",
}


def knock(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """Opens a TCP connection and closes it; empty when that works, else one of `MENDS`, or the system's words."""
    try:
        with socket.create_connection(split(address), timeout_s):
            return ""
    except TimeoutError:
        return "timed out"
    except ConnectionRefusedError:
        return "refused"
    except socket.gaierror:
        return "unknown name"
    except ValueError as error:
        return str(error)
    except OSError as error:
        unrouted = (errno.EHOSTUNREACH, errno.ENETUNREACH)
        return "no route" if error.errno in unrouted else error.strerror or str(error)


def reachability(targets: Sequence[Target], is_inside: bool, knock: Callable[[str], str] = knock) -> Iterator[Check]:
    """All at once, so it takes as long as one.

    Args:
        is_inside: this is where they have to be reachable; elsewhere it is only of interest.
    """
    seen = list(dict.fromkeys(targets))[:MOST]
    if not seen:
        return
    with ThreadPoolExecutor(min(AT_ONCE, len(seen))) as pool:
        answers = dict(zip(seen, pool.map(lambda target: knock(target.address), seen), strict=True))
    failures: dict[str, list[str]] = defaultdict(list)
    for target, answer in answers.items():
        if answer:
            failures[answer].append(f"{target.name} ({target.address})")
    num_good = sum(not answer for answer in answers.values())
    if num_good:
        yield Check("reachable", "ok", f"{num_good} of {len(seen)} addresses of the cluster, from here")
    state: State = "fail" if is_inside else "warn"
    for answer, which in sorted(failures.items()):
        fix = MENDS.get(answer, "look at the network between here and there")
        if not is_inside:
            fix = f"as it should be where this runs outside of the cluster's network; else {fix}"
        yield Check("unreachable", state, f"{answer}: {names(which)}", fix)


def wrongly_announced(targets: Sequence[Target], is_one_machine: bool) -> Iterator[Check]:
    """Addresses that mean another machine to each who reads them."""
    for target in targets:
        host = target.address.rpartition(":")[0]
        if host in NOWHERE:
            yield Check(f"address of {target.name}", "warn", target.address, WILDCARD)
        elif is_loopback(host) and not is_one_machine:
            yield Check(
                f"address of {target.name}",
                "fail",
                f"{target.address} means another machine on each node",
                "workers on several nodes need addresses between them: `ray start --node-ip-address`",
            )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def takes_anybody(url: str) -> bool:
    """Whether the Redis at a URL answers without a password, too; False where that cannot be tried."""
    try:
        parts = urlsplit(url)
        bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        return bool(parts.hostname) and asyncio.run(_answers(bare))
    except ValueError:  # it is no URL
        return False


async def _answers(url: str) -> bool:
    try:
        connection = RedisConnection(url)
    except ConfigError:
        return False
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await connection.call("PING")
            return True
    except (TimeoutError, StoreUnavailable):
        return False
    finally:
        await connection.close()
