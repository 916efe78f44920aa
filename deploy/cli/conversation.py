"""`baton chat`: messages of the user, and their answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping

from baton.chat import ChatMessage
from baton.errors import BatonError
from deploy.cli.options import console, print_error
from deploy.operator.client import Access, Client
from deploy.operator.http_client import HttpClient, is_url
from deploy.operator.talk import ANSWER_S, GrpcSpeaker, HttpSpeaker, Speaker
from deploy.say import say

EXIT, RESET, HELP = "/exit", "/reset", "/help"
COMMANDS = f"{EXIT} or Ctrl-D ends it, {RESET} begins anew, Ctrl-C stops an answer, {HELP} shows this"
PROMPT = "> "


def converse(address: str, access: Access, options: Mapping[str, int | float], system: str) -> None:
    """Chat with the model; each line of standard input is a message.

    Args:
        address: host:port for gRPC, a URL for HTTP.
        access: the API key and TLS for the router.
        options: parameters of every answer, by their names in every API.
        system: what the conversation begins with; empty: nothing.
    """
    speaker: Speaker
    if is_url(address):
        speaker = HttpSpeaker(HttpClient(address, access, ANSWER_S), options)
    else:
        speaker = GrpcSpeaker(Client(address, access.api_key, access.tls), options)
    with contextlib.closing(speaker):
        if sys.stdin.isatty():
            import readline  # noqa: F401 - `input` then has a history and keys to edit with

            console().print(COMMANDS, style="dim")
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
            console().print(COMMANDS, style="dim")
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
            say(piece, end="")
    except KeyboardInterrupt:
        pass
    except BatonError as error:
        print_error(error)
    if pieces:
        say("")
    return "".join(pieces)


def _line() -> str | None:
    """The next line of standard input; None: it has ended, or Ctrl-C ended it."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
