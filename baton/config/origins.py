"""Source of each setting's value: the default, the file, or an environment variable."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.config.load import Config, load, read_file, variables
from baton.config.secrets import HIDDEN, without_password
from baton.config.section import SECRET, is_listed

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class SettingOrigin:
    """Setting in a form that may be shown: the value of a secret is hidden."""

    name: str
    """section.field, as in the file."""
    value: Any
    """JSON-compatible value."""
    origin: str
    """`default`, the path of the file, or the name of the variable."""


def origins(path: Path | None = None, environ: Mapping[str, str] | None = None) -> list[SettingOrigin]:
    """Return every setting of the configuration that `load` returns for the same file and environment, in order.

    Unlisted settings are among them only if they are set.

    Raises:
        ConfigError: as for `load`.
    """
    environ = os.environ if environ is None else environ
    config = load(path, environ)
    given = {(section, name): str(path) for section, values in read_file(path).items() for name in values}
    given |= {(section, name): variable for variable, section, name in variables(environ)}
    return list(_shown(config, given))


def _shown(config: Config, given: Mapping[tuple[str, str], str]) -> Iterator[SettingOrigin]:
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            is_secret = SECRET in type(values).__pydantic_fields__[field.name].metadata
            origin = given.get((section.name, field.name), DEFAULT)
            if origin == DEFAULT and not is_listed(type(config), section.name):
                continue
            # A secret may look like a URL; all of it must be hidden, not its password only.
            is_hidden = is_secret and bool(value) and not field.name.endswith("_url")
            shown = HIDDEN if is_hidden else _without_passwords(value)
            yield SettingOrigin(f"{section.name}.{field.name}", shown, origin)


def _without_passwords(value: Any) -> Any:
    """Return the value as JSON types, without the passwords of URLs."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _without_passwords(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _without_passwords(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_without_passwords(each) for each in value]
    return without_password(value) if isinstance(value, str) and "://" in value else value
