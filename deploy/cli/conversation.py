"""`baton chat`: reads messages and prints the replies."""

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
COMMANDS = f"{EXIT} or Ctrl-D ends the chat, {RESET} starts a new one, Ctrl-C stops a reply, {HELP} shows this help"
PROMPT = "> "


def converse(address: str, access: Access, options: Mapping[str, int | float], *, system: str, model: str = "") -> None:
    """Chat with the model; each line of standard input is a message.

    Args:
        address: host:port for gRPC, a URL for HTTP.
        access: the API key and TLS for the router.
        options: sampling parameters of every reply, by their names, which are the same in every API.
        system: system message; empty: none.
        model: model or adapter; empty: the router's default.
    """
    speaker: Speaker
    if is_url(address):
        speaker = HttpSpeaker(HttpClient(address, access, ANSWER_S), options, model)
    else:
        speaker = GrpcSpeaker(Client(address, access.api_key, access.tls), options, model)
    with contextlib.closing(speaker):
        if sys.stdin.isatty():
            import readline  # noqa: F401 - it gives `input` a history and editing keys

            console().print(COMMANDS, style="dim")
        talk(speaker, system, _line)


def talk(speaker: Speaker, system: str, read_line: Callable[[], str | None]) -> None:
    """Read messages and print the replies until the input ends, or a message is /exit.

    Args:
        speaker: client that gets the replies.
        system: system message; empty: none.
        read_line: returns the user's next line; None at the end of the input.
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
    """Print a reply as it arrives, and return the text that arrived. Print the error if the reply fails."""
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
    """Return the next line of standard input; None at its end, or after Ctrl-C."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
