"""`baton status --watch`: live goodput, latencies and pools on a terminal.

It has two sources: the status, with the counts of all routers, and the metrics of one router for details. Without
metrics it shows fewer figures, and a note.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.errors import BatonError, InvalidRequest, NoWorker
from deploy.operator.client import OPEN, Access, Client, StatusJson
from deploy.operator.scrape import Samples, Scraper, seen_from
from deploy.operator.tables import in_order, model_in_words, with_releases

REFRESH_S = 1.0
RECENT_S = 10.0
"""Window of the current goodput, in seconds."""
WINDOW_S = 60.0
"""Window of quantiles, shares and the sparkline of goodput, in seconds."""
BARS = "▁▂▃▄▅▆▇█"
TTFT = "gen_ai_server_time_to_first_token_seconds"
ITL = "baton_inter_token_latency_seconds"
REQUESTS, MISSES = "baton_requests_slo_total", "baton_slo_misses_total"


@dataclass(frozen=True, slots=True)
class Snapshot:
    at_s: float
    """Monotonic."""
    status: StatusJson
    metrics: Samples | None
    """None: the metrics could not be read."""


class Quantile(NamedTuple):
    """Quantile of a histogram."""

    value: float
    is_above: bool = False
    """The quantile lies above `value`, the last finite bound, by an unknown amount."""
    is_below: bool = False
    """The quantile lies below `value`, the first bound."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds; None: nothing was measured in the window."""

    p50: Quantile | None = None
    p99: Quantile | None = None


@dataclass(frozen=True, slots=True)
class ClassView:
    """Figures of one SLO class over the window."""

    name: str
    per_s: float
    """Rate of requests that met their objectives."""
    attainment: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Figures that are shown. Rates are per second; None: unknown."""

    goodput: float | None = None
    """Rate of requests that met their objectives, over all routers."""
    attainment: float | None = None
    """Share of finished requests that met their objectives, over all routers; cancelled requests do not count."""
    line: tuple[float, ...] = ()
    """Goodput between consecutive snapshots."""
    tokens: float | None = None
    """Tokens per second in requests that met their objectives."""
    classes: tuple[ClassView, ...] = ()
    blame: tuple[tuple[str, float], ...] = ()
    """(stage, share of the misses), the largest share first."""
    ttft: Quantiles = field(default_factory=Quantiles)
    itl: Quantiles = field(default_factory=Quantiles)
    hit_rate: float | None = None
    hit_ceiling: float | None = None
    """Hit rate of a cache without eviction."""


def view(snapshots: Sequence[Snapshot]) -> View:
    """Return the figures of snapshots, which are ordered oldest first. Ignore snapshots older than `WINDOW_S`."""
    if not snapshots:
        return View()
    now = snapshots[-1]
    window = [each for each in snapshots if now.at_s - each.at_s <= WINDOW_S]
    recent = next(each for each in window if now.at_s - each.at_s <= RECENT_S)
    met, ended = _counts(window[0], now)
    measured = [each for each in window if each.metrics is not None]
    known = View(
        goodput=_rate(_counts(recent, now)[0], now.at_s - recent.at_s),
        attainment=met / ended if ended else None,
        line=tuple(
            _rate(_counts(before, after)[0], after.at_s - before.at_s) or 0.0
            for before, after in itertools.pairwise(window)
        ),
    )
    if len(measured) < 2:
        return known
    return _with_metrics(known, measured)


def _with_metrics(known: View, measured: Sequence[Snapshot]) -> View:
    old, new = measured[0].metrics, measured[-1].metrics
    assert old is not None
    assert new is not None
    span_s = measured[-1].at_s - measured[0].at_s

    def grown(name: str) -> float:
        return max(0.0, new.sum(name) - old.sum(name))

    prompt = grown("baton_prompt_tokens_total")
    ceiling = grown("baton_prefix_ceiling_tokens_total")
    blame = {
        stage: count - old.sum(MISSES, stage=stage)
        for stage, count in new.by("stage", MISSES).items()
        if count > old.sum(MISSES, stage=stage)
    }
    return View(
        goodput=known.goodput,
        attainment=known.attainment,
        line=known.line,
        tokens=_rate(grown("baton_tokens_slo_met_total"), span_s),
        classes=tuple(_class(old, new, name, span_s) for name in sorted(new.by("slo_class", REQUESTS))),
        blame=tuple(
            (stage, count / sum(blame.values())) for stage, count in sorted(blame.items(), key=lambda x: -x[1])
        ),
        ttft=_quantiles(old.buckets(TTFT), new.buckets(TTFT)),
        itl=_quantiles(old.buckets(ITL), new.buckets(ITL)),
        hit_rate=grown("baton_prefix_hit_tokens_total") / prompt if prompt else None,
        hit_ceiling=ceiling / prompt if prompt and ceiling else None,
    )


def _class(old: Samples, new: Samples, name: str, span_s: float) -> ClassView:
    before, after = (samples.by("outcome", REQUESTS, slo_class=name) for samples in (old, new))
    ended = {outcome: max(0.0, count - before[outcome]) for outcome, count in after.items() if outcome != "cancelled"}
    total = sum(ended.values())
    return ClassView(name, ended.get("met", 0.0) / span_s, ended.get("met", 0.0) / total if total else None)


def _counts(before: Snapshot, after: Snapshot) -> tuple[float, float]:
    """Return how many requests met their objectives and how many finished between two snapshots.

    A new router counts from 0.
    """
    old = {(router["id"], router["pid"]): router for router in before.status["routers"]}
    met = ended = 0
    for router in after.status["routers"]:
        was = old.get((router["id"], router["pid"]), {"met": 0, "missed": 0, "rejected": 0})
        met += router["met"] - was["met"]
        ended += sum(router[name] - was[name] for name in ("met", "missed", "rejected"))
    return max(0, met), max(0, ended)


def _rate(count: float, span_s: float) -> float | None:
    return count / span_s if span_s > 0 else None


def _quantiles(old: Mapping[float, float], new: Mapping[float, float]) -> Quantiles:
    counts = {bound: count - old.get(bound, 0.0) for bound, count in new.items()}
    return Quantiles(quantile(0.5, counts), quantile(0.99, counts))


def quantile(q: float, counts: Mapping[float, float]) -> Quantile | None:
    """Return a quantile as Prometheus' histogram_quantile does, with linear interpolation within a bucket.

    A quantile in the first or the last bucket is marked as such; None without samples.

    Args:
        q: 0 to 1.
        counts: cumulative counts by upper bound, in ascending order; the last bound is infinite.
    """
    if not counts or (total := counts[math.inf]) <= 0:
        return None
    rank, bound_below, count_below = q * total, 0.0, 0.0
    for bound, count in counts.items():
        if bound == math.inf:
            break
        if count >= rank and count > count_below:
            if not bound_below:
                return Quantile(bound, is_below=True)
            return Quantile(bound_below + (bound - bound_below) * (rank - count_below) / (count - count_below))
        bound_below, count_below = bound, count
    return Quantile(bound_below, is_above=True)


def watch(address: str, console: Console, access: Access = OPEN, seconds: float = math.inf, *, model: str = "") -> None:
    """Show the cluster's state every second until Ctrl-C, or for the given time.

    Args:
        model: model whose workers are shown; empty: those of all models.

    Raises:
        InvalidRequest: the console is not a terminal.
        NoWorker: no router answers the first call. Later, the display waits for one.
    """
    if not console.is_terminal:
        raise InvalidRequest("--watch needs a terminal; --json prints the status once")
    client = Client(address, access.api_key, access.tls, model=model)
    snapshots: deque[Snapshot] = deque()
    scraper: Scraper | None = None
    end_s = time.monotonic() + seconds
    try:
        status: StatusJson = client.status()
        scraper = Scraper(seen_from(status["routers"][0]["http"], address), access, REFRESH_S)
        with ended_by_ctrl_c() as ctrl_c, Live(console=console, screen=True, auto_refresh=False) as live:
            while time.monotonic() < end_s and not ctrl_c.came:
                begin_s = time.monotonic()
                try:
                    snapshots.append(Snapshot(begin_s, client.status(), _metrics(scraper)))
                    lost = ""
                except BatonError as error:
                    lost = str(error)
                while snapshots and begin_s - snapshots[0].at_s > WINDOW_S:
                    snapshots.popleft()
                status = snapshots[-1].status if snapshots else status
                has_metrics = bool(snapshots) and snapshots[-1].metrics is not None
                live.update(picture(view(snapshots), status, address, has_metrics, lost), refresh=True)
                time.sleep(max(0.0, begin_s + REFRESH_S - time.monotonic()))
    finally:
        client.close()
        if scraper is not None:
            scraper.close()


@dataclass(slots=True)
class CtrlC:
    came: bool = False


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[CtrlC]:
    """Context manager: Ctrl-C leaves the block, and sets `came`. Use it on the main thread only.

    `came` is needed because a KeyboardInterrupt is lost if it is raised in a destructor or in a library's callback.
    """
    noted = CtrlC()
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        noted.came = True
        signal.default_int_handler(number, frame)

    if before is signal.default_int_handler:  # otherwise SIGINT is ignored, or has another handler
        signal.signal(signal.SIGINT, note)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _metrics(scraper: Scraper) -> Samples | None:
    try:
        return scraper.read().without("worker")  # the status has them, and a minute of their samples is large
    except NoWorker:
        return None


def picture(seen: View, status: StatusJson, address: str, has_metrics: bool, lost: str) -> RenderableType:
    """Return the whole display, for a terminal of at least 80 columns.

    Args:
        lost: why the router does not answer; the other arguments are then the last known state. Empty: it answers.
    """
    return Group(
        _heading(status, address, has_metrics, lost),
        Text(),
        _figures(seen),
        Text(),
        _worker_table(with_releases(status["workers"])),
    )


def _heading(status: StatusJson, address: str, has_metrics: bool, lost: str) -> Text:
    models = ", ".join(dict.fromkeys(map(model_in_words, status["models"])))
    text = Text()
    text.append(f"{models} at {address}", style="bold")
    text.append(f"   {time.strftime('%H:%M:%S')}   Ctrl-C ends\n", style="dim")
    for name, pool in status["pools"].items():
        style = "" if pool["ready"] >= pool["desired"] else "yellow"
        text.append(f"{name} {pool['ready']} of {pool['desired']} ready   ", style=style)
    num_routers = len(status["routers"])
    text.append(f"{num_routers} router{'s' if num_routers != 1 else ''}   ")
    has_controller, has_redis = bool(status.get("controller")), status["redis"]["ok"]
    text.append(f"controller {'ok' if has_controller else 'none'}   ", style="" if has_controller else "yellow")
    text.append(f"Redis {'ok' if has_redis else 'lost'}", style="" if has_redis else "red")
    for each in status["redis"]["garbage"]:
        text.append(f"\nin Redis, {each['what']} skipped {each['times']} times: {each['latest']}", style="yellow")
    if lost:
        text.append(f"\nlost: {lost}; last known state", style="bold red")
    if not has_metrics:
        text.append("\nno metrics from here: goodput only", style="yellow")
    elif num_routers > 1:
        text.append(f"\nclasses, latencies and cache: of one router of {num_routers}", style="dim")
    return text


def _figures(seen: View) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_row("goodput", f"{_number(seen.goodput)} requests/s", sparkline(seen.line[-40:]))
    table.add_row("met their SLO", _share(seen.attainment), f"{_number(seen.tokens)} tokens/s in them")
    for each in seen.classes:
        table.add_row(f"  {each.name}", _share(each.attainment), f"{_number(each.per_s)} requests/s")
    if seen.blame:
        blamed = ", ".join(f"{stage} {_share(share)}" for stage, share in seen.blame)
        table.add_row("misses blamed on", blamed)
    table.add_row("first token", f"p50 {_latency(seen.ttft.p50)}", f"p99 {_latency(seen.ttft.p99)}")
    table.add_row("between tokens", f"p50 {_latency(seen.itl.p50)}", f"p99 {_latency(seen.itl.p99)}")
    ceiling = f"of {_share(seen.hit_ceiling)} possible" if seen.hit_ceiling is not None else ""
    table.add_row("prompt cached", _share(seen.hit_rate), ceiling)
    return table


def _worker_table(workers: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "role", "state", "running", "waiting", "KV in use", "cached", "node"):
        table.add_column(heading)
    for worker in in_order(workers):
        blocks = worker["blocks"]
        total = blocks["total"] or 1
        is_well = worker["self_check"] == "ok"
        state = worker["state"] if is_well else f"{worker['state']}: {worker['self_check']}"
        table.add_row(
            worker["id"],
            worker["role"],
            state,
            str(worker["running"]),
            str(worker["waiting"]),
            _share(blocks["in_use"] / total),
            _share(blocks["cached"] / total),
            worker["node"],
            style="red" if not is_well else "" if worker["state"] == "ready" else "yellow",
        )
    return table


def sparkline(values: Sequence[float]) -> str:
    top = max(values, default=0.0)
    return "".join(BARS[round(value / top * (len(BARS) - 1))] if top else BARS[0] for value in values)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _latency(found: Quantile | None) -> str:
    if found is None:
        return "-"
    if found.is_above:
        return f"> {found.value:,g} s"
    if found.value >= 1:
        text = f"{found.value:.2f} s"
    else:
        text = f"{found.value * 1e3:.{1 if found.value < 0.01 else 0}f} ms"
    return f"< {text}" if found.is_below else text
