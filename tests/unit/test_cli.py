"""What the commands print."""

from __future__ import annotations

from rich.console import Console

from deploy.cli import worker_table


def test_the_status_table_shows_a_workers_transfers() -> None:
    worker = {
        "id": "decode-0", "state": "ready", "pid": 7, "address": "h:1", "running": 1, "waiting": 2, "self_check": "ok",
        "blocks": {"total": 10, "free": 4, "cached": 5, "in_use": 1},
        "transfers": {
            "open_pairs": 4, "slots_in_use": 3, "unsent_bytes": 3 * 2**19, "committed": 12, "failed": 6,
            "pulled_tokens": 320,
        },
    }  # fmt: skip
    console = Console(width=300)
    with console.capture() as captured:
        console.print(worker_table([worker]))
    heading, row = captured.get().splitlines()
    wanted = {"pairs": "4", "slots": "3", "unsent MiB": "1.5", "kv ok/failed": "12/6", "pulled tokens": "320"}
    for name, value in wanted.items():
        at = heading.index(name)
        assert row[at:].split()[0] == value, name
