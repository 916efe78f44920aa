"""Plots of the arena's results. Needs matplotlib, unlike the rest: `pip install 'baton-serving[plot]'`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from lab.simulate.grid import Cell

OURS = "baton"


def plot(folder: Path, title: str, cells: Sequence[Cell]) -> list[Path]:
    """Plot goodput and time to first token over the load, or by policy for a single load, and cache against balance.

    Args:
        folder: output folder; created if it does not exist.

    Returns:
        The PNG files.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib; install it with: pip install 'baton-serving[plot]'") from None
    pictures: dict[str, Callable[[Axes, Sequence[Cell]], None]] = {
        "goodput": lambda axes, cells: _over_load(axes, cells, "requests within their objectives / s", _goodput),
        "ttft": lambda axes, cells: _over_load(axes, cells, "time to first token, p90, s", _ttft),
        "cache": _cache_against_balance,
    }
    files = []
    for name, draw in pictures.items():
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        draw(axes, cells)
        axes.grid(visible=True, alpha=0.3)
        files.append(folder / f"{name}.png")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(files[-1], dpi=120)
        except OSError as error:
            raise ConfigError(f"cannot write {files[-1]}: {error}") from error
    return files


def _goodput(cell: Cell) -> float:
    return cell.result.goodput_per_s


def _ttft(cell: Cell) -> float:
    return cell.result.ttft_s[1]


def _over_load(axes: Axes, cells: Sequence[Cell], what: str, value: Callable[[Cell], float]) -> None:
    lines: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.setting.load):
        lines.setdefault(cell.name, []).append(cell)
    if len({cell.setting.load for cell in cells}) == 1:
        ordered = sorted(cells, key=value)
        colours = ["tab:red" if cell.result.policy == OURS else "tab:gray" for cell in ordered]
        axes.barh([cell.name for cell in ordered], [value(cell) for cell in ordered], color=colours)
        axes.set_xlabel(what)
        return
    for name, line in lines.items():
        emphasis = {"linewidth": 2.5, "color": "tab:red"} if name == OURS else {"linewidth": 1.0}
        axes.plot([c.setting.load for c in line], [value(c) for c in line], marker="o", label=name, **emphasis)
    axes.set_xlabel("load")
    axes.set_ylabel(what)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def _cache_against_balance(axes: Axes, cells: Sequence[Cell]) -> None:
    for cell in cells:
        ours = cell.result.policy == OURS
        axes.scatter(cell.result.imbalance, cell.result.hit_rate, color="tab:red" if ours else "tab:gray")
        label = f"{cell.name} x{cell.setting.load:g}"
        axes.annotate(label, (cell.result.imbalance, cell.result.hit_rate), fontsize="x-small", alpha=0.8)
    axes.set_xlabel("imbalance: most over mean of the tokens computed")
    axes.set_ylabel("prefix hit rate")
