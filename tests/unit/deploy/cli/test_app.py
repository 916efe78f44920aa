"""The table of commands: each is where it says, and says of itself what the table says."""

from __future__ import annotations

import inspect

import pytest
import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner

from deploy.cli.app import COMMANDS, app, function_of


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_sentence_of_each_ones_help(name: str) -> None:
    first = (inspect.getdoc(function_of(name)) or "").split("\n\n")[0]
    assert COMMANDS[name][1] == " ".join(first.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_its_own_options(name: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    context = group.commands[name].make_context(name, [], resilient_parsing=True)
    assert {parameter.name for parameter in context.command.params} == {
        *inspect.signature(function_of(name)).parameters
    }
    assert context.command.name == name


def test_help_lists_every_command_in_order() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    places = [shown.index(f"│ {name} ") for name in COMMANDS]
    assert places == sorted(places)
