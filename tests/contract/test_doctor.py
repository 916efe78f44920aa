"""What `baton doctor` says of a Redis that is not our own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from baton.cluster import WorkerLoad
from baton.config import Config, IndexConfig
from deploy.doctor import Check, diagnose, redis
from deploy.embedded_redis import EmbeddedRedis
from kvstore.index import RedisConnection
from kvstore.index.keys import Keys
from tests.support.builders import worker_info

if TYPE_CHECKING:
    from tests.contract.conftest import RedisServer


def eviction_check(url: str) -> Check:
    (found,) = [
        c for c in diagnose(Config(index=IndexConfig(redis_url=url)), "127.0.0.1:1") if c.name == "redis eviction"
    ]
    return found


async def set_policy(url: str, policy: str) -> None:
    connection = RedisConnection(url)
    await connection.call("CONFIG", "SET", "maxmemory-policy", policy)
    await connection.close()


def test_an_eviction_policy_is_a_failure() -> None:
    with EmbeddedRedis() as server:
        for policy, state in (("noeviction", "ok"), ("allkeys-lru", "fail"), ("volatile-ttl", "fail")):
            asyncio.run(set_policy(server.url, policy))
            check = eviction_check(server.url)
            assert (check.state, check.found) == (state, f"maxmemory-policy is {policy}")
            assert ("noeviction" in check.fix) == (state == "fail")


async def test_a_lease_that_cannot_be_read_is_told_and_hides_no_other(server: RedisServer, namespace: str) -> None:
    """Regression: the doctor ended with the error of its decoder."""
    leases = server.backend(namespace).leases
    for worker_id in ("w-0", "w-1", "w-2"):
        epoch = await leases.acquire(worker_id)
        await leases.renew(worker_info(worker_id, epoch=epoch, content_id="c"), WorkerLoad())
    connection, keys = server.backend(namespace).connection, Keys(namespace)
    assert connection
    await connection.pipeline([("DEL", keys.lease("w-0")), ("SET", keys.lease("w-0"), "x")])
    await connection.call("HSET", keys.lease("w-2"), "load", "{")
    await connection.call("SET", Keys(namespace[::-1]).workers, "x")
    found = await redis._look(server.embedded.url)
    mine = [lease.worker.info.id for lease in found.leases if lease.worker.info.content_id == "c"]
    assert mine == ["w-1"]
    checks = [check for check in redis.leases(found, lease_s=10.0) if check.name == "redis values"]
    assert {check.state for check in checks} == {"warn"}
    assert {check.found.partition(" ")[0] for check in checks} == {"lease", "workers"}
    await connection.call("DEL", Keys(namespace[::-1]).workers)


def test_a_redis_that_is_away_is_no_secret() -> None:
    check = eviction_check("redis://127.0.0.1:1/0")
    assert check.state == "warn"
    assert check.found.startswith("not checked: Redis: ")
