"""Checks that addresses can be reached from here, with the likely cause if not."""

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
"""Maximum number of addresses to try."""


WILDCARD = "no client can connect to a wildcard address: set cluster.advertise_host to the pod's own"


class Target(NamedTuple):
    name: str
    address: str
    """host:port."""


FIXES = {
    "timed out": "packets are dropped, probably by a NetworkPolicy or a firewall: allow this pod to reach that port",
    "refused": "the machine answers, but nothing listens on this port: the process is gone or listens on another "
    "address (only on loopback?); a policy that rejects connections looks the same",
    "no route": "no network leads there: check the CNI, or run this inside the cluster",
    "unknown name": "DNS does not know it: check that the Service exists, and that this pod may reach DNS (egress to "
    "port 53)",
}


def knock(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """Open and close a TCP connection. Return "" on success, else a key of `FIXES` or the system's error message."""
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
    """Check all targets concurrently.

    Args:
        is_inside: this process runs inside the cluster, where all targets must be reachable; elsewhere only warn.
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
        yield Check("reachable", "ok", f"{num_good} of {len(seen)} addresses of the cluster can be reached from here")
    state: State = "fail" if is_inside else "warn"
    for answer, which in sorted(failures.items()):
        fix = FIXES.get(answer, "check the network between here and there")
        if not is_inside:
            fix = f"expected if this runs outside the cluster's network; otherwise: {fix}"
        yield Check("unreachable", state, f"{answer}: {names(which)}", fix)


def wrongly_announced(targets: Sequence[Target], is_one_machine: bool) -> Iterator[Check]:
    """Check for addresses that stand for a different machine on each node."""
    for target in targets:
        host = target.address.rpartition(":")[0]
        if host in NOWHERE:
            yield Check(f"address of {target.name}", "warn", target.address, WILDCARD)
        elif is_loopback(host) and not is_one_machine:
            yield Check(
                f"address of {target.name}",
                "fail",
                f"{target.address} stands for a different machine on each node",
                "workers on several nodes need addresses that other nodes can reach: `ray start --node-ip-address`",
            )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def takes_anybody(url: str) -> bool:
    """Return whether the Redis at a URL also answers without a password; False if that cannot be tried."""
    try:
        parts = urlsplit(url)
        bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        return bool(parts.hostname) and asyncio.run(_answers(bare))
    except ValueError:  # not a URL
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
