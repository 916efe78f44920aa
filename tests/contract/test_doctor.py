"""What `baton doctor` says of a Redis that is not our own."""

from __future__ import annotations

import asyncio

from baton.config import Config, IndexConfig
from deploy.doctor import Check, diagnose
from deploy.embedded_redis import EmbeddedRedis
from kvstore.index import RedisConnection


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


def test_a_redis_that_is_away_is_no_secret() -> None:
    check = eviction_check("redis://127.0.0.1:1/0")
    assert check.state == "warn"
    assert check.found.startswith("not checked: Redis: ")
