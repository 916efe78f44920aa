"""`baton chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from baton.chat import ChatMessage
from baton.config import DEFAULT_ADDRESS
from baton.errors import BatonError
from deploy.cli.options import Address, ApiKey, console, options_from_fields, print_error
from deploy.operator.client import Access, Client
from deploy.operator.http_door import HttpDoor, is_url
from deploy.operator.talk import ANSWER_S, GrpcSpeaker, HttpSpeaker, Speaker
from deploy.operator.trust import TrustOptions

EXIT, RESET, HELP = "/exit", "/reset", "/help"
COMMANDS = f"{EXIT} or Ctrl-D ends it, {RESET} begins anew, Ctrl-C stops an answer, {HELP} shows this"
PROMPT = "> "


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How answers are drawn; None: as the model recommends."""

    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.", show_default="to its end")] = None
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None

    def given(self) -> dict[str, int | float]:
        """Returns those that were given, by their names in every API."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@options_from_fields
def chat(
    trust: TrustOptions,
    options: AnswerOptions,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
) -> None:
    """Talk with the model: each line is a message, answers are streamed.

    With --address http://HOST:PORT over HTTP, as OpenAI's clients do; with HOST:PORT over gRPC.

    /exit or Ctrl-D ends it, /reset begins anew, Ctrl-C stops an answer.
    """
    access = Access(api_key, trust.read())
    speaker: Speaker
    if is_url(address):
        speaker = HttpSpeaker(HttpDoor(address, access, ANSWER_S), options.given())
    else:
        speaker = GrpcSpeaker(Client(address, api_key, access.tls), options.given())
    with contextlib.closing(speaker):
        if sys.stdin.isatty():
            import readline  # noqa: F401 - `input` then has a history and keys to edit with

            console.print(COMMANDS, style="dim")
        talk(speaker, system, _line)


def talk(speaker: Speaker, system: str, read_line: Callable[[], str | None]) -> None:
    """Reads messages and prints their answers until there are no more, or one is /exit.

    Args:
        speaker: answers.
        system: what the conversation begins with; empty: nothing.
        read_line: returns the next line of the user; None: there is none.
    """
    opening = [ChatMessage(role="system", content=system)] if system else []
    messages = list(opening)
    while (line := read_line()) is not None and (text := line.strip()) != EXIT:
        if text == RESET:
            messages = list(opening)
        elif text == HELP:
            console.print(COMMANDS, style="dim")
        elif text.startswith("/"):
            print_error(f"there is no command {text.split()[0]}; {COMMANDS}")
        elif text:
            asked = [*messages, ChatMessage(role="user", content=text)]
            if answer := _printed(speaker, asked):
                messages = [*asked, ChatMessage(role="assistant", content=answer)]


def _printed(speaker: Speaker, messages: list[ChatMessage]) -> str:
    """Prints an answer as it comes, and returns what came of it; empty: none did, and the reason is printed."""
    pieces: list[str] = []
    try:
        for piece in speaker.answer(messages):
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except BatonError as error:
        print_error(error)
    if pieces:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return "".join(pieces)


def _line() -> str | None:
    """The next line of standard input; None: it has ended, or Ctrl-C ended it."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
