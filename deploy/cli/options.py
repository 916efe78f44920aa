"""Shared code of the commands: the console, common options, and options from dataclasses."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.addresses import DEFAULT_ADDRESS
from deploy.operator.trust import TrustOptions

if TYPE_CHECKING:
    from deploy.operator.client import Client
    from deploy.terminal import Terminal

ApiKey = Annotated[
    str,
    typer.Option(
        help="API key. Commands other than `generate` and `chat` need an operator key if tenants are configured.",
        envvar="BATON_API_KEY",
        show_default=False,
    ),
]
Address = Annotated[str, typer.Option(help="Address of the router, host:port.", envvar="BATON_ADDRESS")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
RequestedModel = Annotated[
    str, typer.Option(help="Model or adapter to request. Default: the only model, or the one of router.default_model.")
]
TimeoutS = Annotated[
    float, typer.Option("--timeout", help="Seconds to wait. The change continues in the background after a timeout.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions(TrustOptions):
    """Access of a command to the cluster, and its output format."""

    address: Address = DEFAULT_ADDRESS
    api_key: ApiKey = ""
    as_json: AsJson = False

    def client(self) -> Client:
        """Return a new client, which the caller must close."""
        from deploy.operator.client import Client

        return Client(self.address, self.api_key, self.read())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(ClientOptions):
    """Access of a command that concerns one model, if the cluster serves several."""

    model: Annotated[
        str, typer.Option(help="Model, if there are several: its name, its release or its content id.")
    ] = ""

    def client(self) -> Client:
        """Return a new client for the model, which the caller must close."""
        from deploy.operator.client import Client

        return Client(self.address, self.api_key, self.read(), model=self.model)


@functools.cache
def console() -> Terminal:
    """Return the console on standard error, for progress and errors; results go to standard output."""
    from deploy.terminal import Terminal

    return Terminal(stderr=True, soft_wrap=True, highlight=False)


def print_error(error: BaseException | str) -> None:
    console().print("error: ", style="red", end="")
    console().print(str(error), markup=False)


def options_from_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: replace each parameter that is a dataclass by one option per annotated field.

    A field without one of Typer's annotations keeps its default, and becomes no option. A field of type
    `tuple[X, ...]` becomes an option that may be repeated.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += [_parameter(field, kind) for field, kind in _options(groups[name])]
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        made = {name: _made(kind, values) for name, kind in groups.items()}
        command(**made, **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(group: type[Any]) -> Iterator[tuple[Field[Any], Any]]:
    """Yield the fields of the dataclass that are options, with their annotations."""
    hints = typing.get_type_hints(group, include_extras=True)
    for field in fields(group):
        if any(type(each).__module__.startswith("typer.") for each in getattr(hints[field.name], "__metadata__", ())):
            yield field, hints[field.name]


def _parameter(field: Field[Any], kind: Any) -> inspect.Parameter:
    default = field.default
    if _is_repeated(kind):
        item, *_ = typing.get_args(typing.get_args(kind)[0])
        kind, default = Annotated[(list[item] | None, *kind.__metadata__)], None  # type: ignore[valid-type]
    assert default is not MISSING, f"the option {field.name} has no default"
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _made(group: type[Any], values: dict[str, Any]) -> Any:
    """Return an instance of the dataclass from its options, and remove these from `values`."""
    found: Mapping[str, Any] = {field.name: _value(kind, values.pop(field.name)) for field, kind in _options(group)}
    return group(**found)


def _value(kind: Any, value: Any) -> Any:
    return tuple(value or ()) if _is_repeated(kind) else value


def _is_repeated(kind: Any) -> bool:
    return typing.get_origin(typing.get_args(kind)[0]) is tuple
