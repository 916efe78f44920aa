"""Log lines of every process, in one form."""

from __future__ import annotations

import logging


def configure(level: str) -> None:
    """Sends log lines of `level` and above to standard error."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s", force=True
    )
    for name in ("uvicorn", "httpx", "opentelemetry"):
        logging.getLogger(name).setLevel("WARNING")
