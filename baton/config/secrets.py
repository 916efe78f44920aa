"""Secrets in settings: passwords in URLs, password files, and messages that quote no secret."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

import yaml

from baton.errors import ConfigError

HIDDEN = "***"
"""Text that is shown instead of a password."""


def without_password(url: str) -> str:
    """Return a URL with its passwords hidden. If it cannot be parsed, hide all of it except its scheme."""
    parts = _split(url)
    if parts is None:
        return f"{url.partition(':')[0]}://{HIDDEN}" if ":" in url else HIDDEN
    if not parts.scheme:
        return url
    hidden = parts if parts.password is None else _with(parts, HIDDEN)
    if "password" in parts.query:
        query = [(name, HIDDEN if "password" in name else value) for name, value in parse_qsl(parts.query)]
        hidden = hidden._replace(query=urlencode(query, safe="*/"))
    return _joined(hidden)


def password_of(url: str) -> str | None:
    """Return the password in the user part of a URL; None if it has none."""
    parts = _split(url)
    return None if parts is None or parts.password is None else unquote(parts.password)


def with_password(url: str, password: str) -> str:
    """Return the URL with another password; an empty password removes it."""
    parts = _split(url)
    return url if parts is None else _joined(_with(parts, quote(password, safe="")))


def read_password(path: str) -> str:
    """Return the content of a password file, without its final line break.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    try:
        found = Path(path).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the password file {path}: {reason}") from None
    if not found:
        raise ConfigError(f"the password file {path} is empty")
    return found


def why_unreadable(error: Exception) -> str:
    """Return the reason and the position of an error in a YAML file, without quoting it: it may contain a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem}, in line {mark.line + 1}, column {mark.column + 1}"
    if isinstance(error, (yaml.YAMLError, UnicodeDecodeError)):
        return "it is not YAML in UTF-8"
    return str(error)


def _split(url: str) -> SplitResult | None:
    """Return the parts of a URL; None if its password may span several parts, as it contains an unescaped / ? or #."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return None if "@" in parts.path + parts.query + parts.fragment else parts


def _with(parts: SplitResult, password: str) -> SplitResult:
    user = (parts.username or "") + (f":{password}" if password else "")
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}@{host}" if user else host)


def _joined(parts: SplitResult) -> str:
    """Return the URL of the parts. `urlunsplit` would drop the slashes of unix:///PATH."""
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{parts.query}" if parts.query else "")
