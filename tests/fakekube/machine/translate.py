"""What stands in for a container's view of the world: its text, with names and paths that lead to the right place here.

Names of Services become addresses, `0.0.0.0` becomes the pod's own address and the paths of mounts become the folders
that the kubelet has made for them. All in one pass: what was put in is not looked at again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
SERVICE = rf"(?<![\w.-])(?P<name>{LABEL})\.(?P<namespace>{LABEL})\.svc(?:\.cluster\.local)?(?![\w-]|\.\w)"
ANY_ADDRESS = r"(?<![\w.])(?P<any>0\.0\.0\.0)(?!\.?\w|/\d)"
VARIABLE = re.compile(r"\$(\$|\(([A-Za-z_.-][\w.-]*)\))")


class UnknownService(Exception):
    """A text names a Service that has no address (yet)."""


@dataclass(frozen=True, slots=True)
class Translation:
    pod_ip: str
    mounts: Mapping[str, str]
    """mountPath -> the folder, or file, that it stands for."""
    address_of: Callable[[str, str], str | None]
    """A Service's name and namespace -> its address; None while there is none."""

    def text(self, text: str) -> str:
        """Raises UnknownService."""
        return re.sub("|".join([SERVICE, ANY_ADDRESS, *self._paths()]), self._replacement, text)

    def path(self, path: str) -> str:
        """Where a path of the container is; the path itself outside all mounts."""
        return self.text(path)

    def _paths(self) -> list[str]:
        """A path begins at its start, after `://` or after something no path has in it, and ends with a component."""
        found = "|".join(re.escape(path) for path in sorted(self.mounts, key=len, reverse=True))
        return [rf"(?:(?<![\w./)}}~*?+%-])|(?<=://))(?P<path>{found})(?![\w.+%-])"] if found else []

    def _replacement(self, found: re.Match[str]) -> str:
        parts = found.groupdict()
        if parts["any"]:
            return self.pod_ip
        if parts.get("path"):
            return self.mounts[parts["path"]]
        address = self.address_of(parts["name"], parts["namespace"])
        if address is None:
            raise UnknownService(f"service {parts['name']!r} of namespace {parts['namespace']!r} has no address")
        return address


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` becomes the variable's value. A name that is not there stays as it is; `$$(NAME)` becomes `$(NAME)`."""

    def replacement(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else variables.get(found[2], found[0])

    return VARIABLE.sub(replacement, text)


def image_name(image: str) -> str:
    """An image's repository, without tag and digest."""
    name = image.partition("@")[0]
    head, slash, tail = name.rpartition("/")
    return head + slash + tail.partition(":")[0]
