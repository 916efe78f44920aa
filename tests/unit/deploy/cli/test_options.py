"""Commands whose options are the fields of dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from deploy.cli.options import AsJson, options_from_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    where: Annotated[str, typer.Argument(help="A place.")] = "here"
    size: Annotated[int, typer.Option(help="A number.")] = 3
    names: Annotated[tuple[str, ...], typer.Option("--name", help="May be repeated.")] = ()
    inner: str = "not an option"


def invoke(*words: str) -> tuple[int, list[object]]:
    app, got = typer.Typer(), list[object]()

    @app.command()
    @options_from_fields
    def command(group: Group, as_json: AsJson = False) -> None:
        got.extend((group, as_json))

    return CliRunner().invoke(app, words).exit_code, got


def test_without_options_the_fields_have_their_defaults() -> None:
    assert invoke() == (0, [Group(), False])


def test_options_fill_the_fields_and_repeated_ones_become_tuples() -> None:
    status, got = invoke("there", "--size", "7", "--name", "a", "--name", "b", "--json")
    assert status == 0
    assert got == [Group(where="there", size=7, names=("a", "b")), True]


def test_a_field_that_is_no_option_cannot_be_given() -> None:
    assert invoke("--inner", "x") == (2, [])
