"""What a benchmark found: tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from tests.bench.stats import Spread

Cell = str | Spread


@dataclass(slots=True)
class Table:
    """Each row has one cell a column; the first says what was measured."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    note: str = ""


@dataclass(slots=True)
class Report:
    name: str
    tables: list[Table]
    seconds: float = 0.0
    other_work_cores: float = 0.0


def show(report: Report, console: Console) -> None:
    for table in report.tables:
        shown = RichTable(title=table.title, caption=table.note or None, title_justify="left", caption_justify="left")
        for index, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if index == 0 else "right")
        for row in table.rows:
            shown.add_row(*(_text(cell) for cell in row))
        console.print(shown)
    console.print(
        f"{report.name}: {report.seconds:.0f} s; other processes kept {report.other_work_cores:.2f} cores busy\n",
        style="dim",
    )


def as_json(report: Report) -> dict[str, Any]:
    """Rows become objects by column; a spread becomes {median, low, high, num_rounds}."""
    return {
        "name": report.name,
        "seconds": round(report.seconds, 1),
        "other_work_cores": round(report.other_work_cores, 2),
        "tables": [
            {
                "title": table.title,
                "rows": [
                    {column: _plain(cell) for column, cell in zip(table.columns, row, strict=True)}
                    for row in table.rows
                ],
            }
            for table in report.tables
        ],
    }


def _plain(cell: Cell) -> Any:
    return dataclasses.asdict(cell) if isinstance(cell, Spread) else cell


def _text(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    return f"{_number(cell.median)} [{_number(cell.low)}–{_number(cell.high)}]"


def _number(value: float) -> str:
    """Three digits that matter."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
