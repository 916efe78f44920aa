"""The router process, `python -m router`. BATON_CONFIG_JSON or BATON_* variables configure it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import uvloop

from baton import config as baton_config
from baton import garbage
from baton.errors import BatonError
from baton.telemetry import logs
from baton.visible import in_line
from router.server import serve


async def _run(config: baton_config.Config) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(config, stop)


def main() -> None:
    garbage.share_heap()
    config = baton_config.process_config()
    logs.configure(config.telemetry.log_level, config.telemetry.log_format, "baton-router")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prompts are small and many: they run in parallel
    try:
        uvloop.run(_run(config))
    except* BatonError as errors:
        sys.exit(in_line(f"router: {'; '.join(str(error) for error in errors.exceptions)}"))
