"""What the commands print."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from deploy.cli import transfer_table, worker_table

WORKER = {
    "id": "decode-0", "state": "draining", "pid": 123456, "address": "127.0.0.1:50052", "running": 64, "waiting": 12,
    "self_check": "ok", "blocks": {"total": 5000, "free": 4000, "cached": 950, "in_use": 50},
    "transfers": {
        "open_pairs": 4, "slots_in_use": 3, "unsent_bytes": 3 * 2**19, "committed": 12, "failed": 6,
        "pulled_tokens": 320,
    },
}  # fmt: skip


def printed(table: Table) -> tuple[str, str]:
    """The heading and the row, in a terminal of 80 columns."""
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    heading, row = captured.get().splitlines()
    return heading, row


def test_the_status_table_fits_a_terminal_whole() -> None:
    heading, row = printed(worker_table([WORKER]))
    assert row.split() == [
        "decode-0",
        "draining",
        "123456",
        "127.0.0.1:50052",
        "64/12",
        "4000/950/50",
        "ok",
    ]
    assert heading.split()[0] == "worker"


def test_the_status_shows_a_workers_transfers() -> None:
    heading, row = printed(transfer_table([WORKER]))
    wanted = {"committed": "12", "failed": "6", "pulled tokens": "320", "unsent MiB": "1.5", "pairs": "4", "slots": "3"}
    for name, value in wanted.items():
        assert row[heading.index(name) :].split()[0] == value, name
