"""Redis connection that reports every failure as StoreUnavailable."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from redis.asyncio import Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from baton.errors import ConfigError, StoreUnavailable
from kvstore.index.garbage import GarbageBook
from kvstore.index.keys import key_kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from baton.tls import Tls

TIMEOUT_S = 5.0
"""Timeout of one response; blocking reads wait for less than this."""


@dataclass(frozen=True, slots=True)
class BadValue:
    """Placeholder for a response: the key holds a value of an unexpected type, or one that is too large."""

    reason: str


class RedisConnection:
    """Pool of connections to the Redis at `redis://HOST:PORT/DB`, `rediss://HOST:PORT/DB` (TLS) or `unix://PATH`.

    It connects on first use. It never retries by itself: an interrupted script may have run, and only its caller knows
    how to proceed.

    Args:
        garbage: records unreadable values; by default a new one.
        tls: trusted authorities and the client certificate for TLS. None, or a URL with TLS options (redis-py's
            `ssl_...`): the system's authorities, or those of the URL.

    Raises:
        ConfigError: the URL is not a Redis URL.
    """

    def __init__(self, url: str, garbage: GarbageBook | None = None, *, tls: Tls | None = None) -> None:
        try:
            self._redis: Any = Redis.from_url(  # its annotations join sync and async results
                url,
                protocol=2,
                # `_one_try` keeps time: redis-py would use asyncio.wait_for, which loses a cancellation on Python 3.11
                # when its inner future is ready at the same moment (python/cpython#86296).
                socket_timeout=None,
                socket_connect_timeout=None,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError:  # its message may contain a part of the password
            raise ConfigError(
                "index.redis_url is not a Redis URL, such as redis://HOST:PORT/DB or unix://PATH; in a password, "
                "encode characters such as / and # as %2F and %23"
            ) from None
        pool = self._redis.connection_pool
        if tls is not None and pool.connection_class is SSLConnection and "ssl_" not in urlsplit(url).query:
            pool.connection_class, pool.connection_kwargs["tls"] = _TlsConnection, tls
        self.url = url
        self.garbage = garbage or GarbageBook()
        self._knows_readers = True
        """True if the server has commands for read-only scripts, as Redis 7 has; read-only users need them."""

    async def call(self, *command: Any) -> Any:
        """Execute one command, and return its response. Raises StoreUnavailable."""
        async with _one_try():
            return await self._redis.execute_command(*command)

    async def pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Execute commands in one round trip, in order, not atomically.

        Their responses must be small whatever the keys contain; `kvstore.index.reads` serves reads of unbounded values.

        Returns:
            The responses; a BadValue for each command that met a value of another type.

        Raises:
            StoreUnavailable: a command failed for another reason.
        """
        if not commands:
            return []
        async with _one_try(), self._redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            answers = await pipe.execute(raise_on_error=False)
        return [_answer(found) for found in answers]

    async def run(self, script: Script, keys: Sequence[str], *args: str | bytes | int) -> list[Any]:
        """Run a script, note the unreadable values that it met, and return its result. Raises StoreUnavailable."""
        async with _one_try():
            return self._results(await self._evaluated("", script, keys, args))

    async def ask(self, script: Script, keys: Sequence[str], *args: str | bytes | int) -> list[Any]:
        """Run a script that writes nothing, like `run`; a user with read-only access may do so."""
        async with _one_try():
            if self._knows_readers:
                try:
                    return self._results(await self._evaluated("_RO", script, keys, args))
                except ResponseError as error:
                    if "unknown command" not in str(error):
                        raise
                    self._knows_readers = False
            return self._results(await self._evaluated("", script, keys, args))

    async def _evaluated(self, suffix: str, script: Script, keys: Sequence[str], args: Sequence[Any]) -> list[Any]:
        found: list[Any]
        try:
            found = await self._redis.execute_command("EVALSHA" + suffix, script.sha, len(keys), *keys, *args)
        except NoScriptError:  # the server is new or restarted; EVAL also loads the script
            found = await self._redis.execute_command("EVAL" + suffix, script.text, len(keys), *keys, *args)
        return found

    def _results(self, answer: Sequence[Any]) -> list[Any]:
        *results, garbage = answer
        for key in garbage:
            self.note(key.decode(errors="replace"), "its type, form or size is wrong")
        return results

    async def boot(self, key: str) -> str:
        """Return the boot token at `key`; draw it if the store has none. Raises StoreUnavailable."""
        (token,) = await self.run(BOOT, [key], uuid.uuid4().hex)
        return str(token, "ascii")

    def note(self, key: str, reason: object) -> None:
        """Note that the value at `key` cannot be read and is skipped."""
        self.garbage.note(key_kind(key), key, reason)

    async def close(self) -> None:
        """Close the pool."""
        await self._redis.aclose()


class _TlsConnection(SSLConnection):
    """TLS connection that reloads certificate files that may have changed since it was last open."""

    def __init__(self, *, tls: Tls, **others: Any) -> None:
        super().__init__(**others)
        self._tls = tls

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "ssl": self._tls.client_context()}


class Script:
    """Lua script from a package's folder, preceded by `prelude.lua`."""

    def __init__(self, package: str, name: str) -> None:
        parts = ((__package__, "prelude.lua"), (package, name))
        self.text = "".join(resources.files(folder).joinpath(part).read_text() for folder, part in parts)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


BOOT = Script("kvstore.index", "boot.lua")


def _answer(found: Any) -> Any:
    """Return the response to one command of a pipeline, or raise StoreUnavailable."""
    if isinstance(found, ResponseError) and "WRONGTYPE" in str(found):
        return BadValue(str(found))
    if isinstance(found, RedisError):
        raise _unavailable(found) from found
    return found


def is_full(error: StoreUnavailable) -> bool:
    """Return whether Redis has refused a write because its memory is used up (`maxmemory`)."""
    return isinstance(error.__cause__, RedisError) and "used memory > 'maxmemory'" in str(error.__cause__)


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"Redis: {error or type(error).__name__}")


@contextlib.asynccontextmanager
async def _one_try() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield
    except (RedisError, OSError) as error:
        raise _unavailable(error) from error
