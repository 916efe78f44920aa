"""A Redis connection that fails in one way only."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from baton.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

TIMEOUT_S = 5.0
"""Longest wait for one answer; blocking reads wait less than this."""


def without_password(url: str) -> str:
    """The URL as others may see it."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


class Connection:
    """A pool of connections to the Redis at `redis://HOST:PORT/DB` or `unix://PATH`; connects on first use.

    It never retries by itself: a script that was cut off may have run, and only its caller knows what to do then.

    Raises:
        ConfigError: the URL is not one of Redis.
    """

    def __init__(self, url: str) -> None:
        try:
            self._redis: Any = Redis.from_url(  # its annotations join sync and async answers
                url,
                protocol=2,
                # `_one_try` keeps time: redis-py would use asyncio.wait_for, which loses a cancellation on Python 3.11
                # when its inner future is ready at the same moment (python/cpython#86296).
                socket_timeout=None,
                socket_connect_timeout=None,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ConfigError(f"index.redis_url is not a URL of Redis: {error}") from error
        self.url = url

    async def call(self, *command: Any) -> Any:
        """Raises: StoreUnavailable."""
        async with _one_try():
            return await self._redis.execute_command(*command)

    async def pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One round trip, in order, not atomic. Raises: StoreUnavailable."""
        if not commands:
            return []
        async with _one_try(), self._redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = await pipe.execute()
        return answers

    async def run(self, script: Script, keys: Sequence[str], *args: str | bytes | int) -> Any:
        """Raises: StoreUnavailable."""
        async with _one_try():
            try:
                return await self._redis.execute_command("EVALSHA", script.sha, len(keys), *keys, *args)
            except NoScriptError:  # the server is new or restarted; EVAL also loads the script
                return await self._redis.execute_command("EVAL", script.text, len(keys), *keys, *args)

    async def boot(self, key: str) -> str:
        """The token at `key`, drawn here if the store has none. Raises: StoreUnavailable."""
        _, token = await self.pipeline([("SET", key, uuid.uuid4().hex, "NX"), ("GET", key)])
        return str(token, "ascii")

    async def close(self) -> None:
        await self._redis.aclose()


class Script:
    """A Lua script that lies beside the code of `package`."""

    def __init__(self, package: str, name: str) -> None:
        self.text = resources.files(package).joinpath(name).read_text()
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


@contextlib.asynccontextmanager
async def _one_try() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield
    except (RedisError, OSError) as error:
        raise StoreUnavailable(f"Redis: {error or type(error).__name__}") from error
