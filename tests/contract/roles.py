"""The users of the chart's Redis, for whom the contract suites run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis import Redis

CHART_REDIS = Path(__file__).parents[2] / "helm" / "baton" / "redis"
PASSWORD = "a-word"
NAMESPACES = {"{ns}": "kv:{" + "?" * 32 + "}:", "{es}": "kv:{endpoint:*}:"}
PARTS = ("router", "worker", "controller")


def rules(file: str = "index.acl") -> dict[str, list[str]]:
    """The rules by user, as words of ACL SETUSER: what start.sh makes of them."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in (CHART_REDIS / file).read_text().splitlines():
        if line and not line.startswith("#"):
            user, _, rest = line.partition(" ")
            for name, pattern in NAMESPACES.items():
                rest = rest.replace(name, pattern)
            found[user] += re.findall(r"\([^)]*\)|\S+", rest)
    return dict(found)


def admitted(url: str) -> None:
    """Makes the users at a server whose default user may do all, and goes on to."""
    with Redis.from_url(url) as admin:
        for user, words in rules().items():
            admin.execute_command("ACL", "SETUSER", user, "reset", "on", f">{PASSWORD}", *words)


def url_of(url: str, user: str) -> str:
    """The URL of a server for one of the users."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{user}:{PASSWORD}@{parts.netloc}"))


class Roles:
    """An index or a registry, every method of which is called on that of the user whose part calls it."""

    def __init__(self, of: Mapping[str, Any], users: Mapping[str, str], reader: str) -> None:
        self._of, self._users, self._reader = of, users, reader

    def __getattr__(self, method: str) -> Any:
        return getattr(self._of[self._users.get(method, self._reader)], method)


INDEX_USERS = {"apply": "worker", "position": "worker"}
LEASE_USERS = {
    **dict.fromkeys(("acquire", "renew", "release", "get_controller"), "worker"),
    **dict.fromkeys(("announce_controller", "set_desired"), "controller"),
}
ENDPOINT_USERS = {"announce_router": "router", "announce_model": "controller"}
"""The part that calls a method; the others are called by routers and by the controller alike."""
