"""`baton up`: runs `deploy.local.up`, and prints the addresses when the cluster is ready."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from baton.config import Config
from baton.errors import BatonError
from baton.tls import own_endpoint_tls
from deploy.cli.hints import local_address, page_url, try_command
from deploy.cli.options import console, print_error
from deploy.local.up import up
from deploy.operator.answer import print_answer, request_of
from deploy.operator.client import Client
from deploy.say import say


def serve(settings: Sequence[Config], ask: str | None, api_key: str) -> None:
    """Run a whole cluster until Ctrl-C.

    Args:
        settings: settings of each model; the first one also says what all models share.
        ask: prompt to send when the cluster is ready; None: no prompt.
        api_key: API key for that prompt.
    """
    asyncio.run(up(settings, console(), lambda ready: _on_ready(ready, ask, api_key)))


def _on_ready(models: Sequence[Config], ask: str | None, api_key: str) -> None:
    settings = models[0]
    cluster = settings.cluster
    address = f"{cluster.host}:{cluster.grpc_port}"
    say(f"BATON READY grpc={address} http={cluster.host}:{cluster.http_port}")
    if len(models) > 1:
        names = ", ".join(dict.fromkeys(each.model.served_name for each in models))
        default = settings.router.default_model
        console().print(f"==> Models: {names}; requests that name none go to {default}", style="dim", markup=False)
    if ask is not None:
        _answer(settings, ask, api_key)
    console().print(f"==> Page: {page_url(settings)}   Ctrl-C stops everything. In another terminal:", style="dim")
    console().print(f"    {try_command(settings, api_key)}", style="dim", markup=False)


def _answer(settings: Config, ask: str, api_key: str) -> None:
    console().print("==> Sample request, 24 tokens:", style="dim")
    console().print(ask, end="", style="bold", markup=False)
    try:
        with contextlib.closing(Client(local_address(settings), api_key, own_endpoint_tls(settings))) as client:
            print_answer(request_of(ask, max_tokens=24, temperature=0.0), client, as_json=False)
    except BatonError as error:
        print_error(error)
