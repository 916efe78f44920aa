"""The router process: `python -m router`, configured by BATON_CONFIG_JSON or by BATON_* variables."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys

import uvloop

from baton import config as baton_config
from baton.errors import BatonError
from baton.telemetry import logs
from router.server import serve

GC_THRESHOLDS = (20_000, 20, 20)
"""Python's own, 700 new objects, has the collector run several times a request. What a request leaves behind is freed
by its reference counts; cycles, of exceptions mostly, may wait."""


async def _run(config: baton_config.Config) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(config, stop)


def main() -> None:
    config = baton_config.process_config()
    logs.configure(config.telemetry.log_level, config.telemetry.log_format, "baton-router")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # there are always many prompts, each a small one
    gc.freeze()  # modules stay for good: the collector need not look at them again and again
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        uvloop.run(_run(config))
    except* BatonError as errors:
        sys.exit(f"router: {'; '.join(str(error) for error in errors.exceptions)}")


if __name__ == "__main__":
    main()
