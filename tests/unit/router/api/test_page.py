"""The page at /: its files are served to everybody and ask nobody but their router, and its figures are right."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from baton.errors import Unauthenticated
from baton.telemetry.request_metrics import TO_COMPUTE, RequestMetrics, prompt_class
from deploy.operator.watch import Quantile, quantile
from router.api.http import create_app
from router.api.page import FILES
from router.cluster.history import counted
from tests.support.models import table_of

OURS = {path: content.decode() for path, content in FILES.items() if "uPlot" not in path}
TEXT = FILES["/"].decode()
SCRIPTS = "\n".join(text for path, text in OURS.items() if path.endswith(".js"))
FORBIDDEN = re.compile(r"@import|\burl\(|\bimport\s*\(|\beval\(|innerHTML|insertAdjacent|document\.write")
"""What would bring something from elsewhere, or make elements of texts."""
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node, which runs the page's script")


def refusing(key: str | None, certificate: Any) -> Any:
    raise Unauthenticated("an API key is needed")


async def get(path: str, **headers: str) -> httpx2.Response:
    tenants: Any = SimpleNamespace(is_open=False, identify=refusing)
    app = create_app(table_of(), tenants, lambda: "", lambda: b"")
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://baton") as client:
        return await client.get(path, headers=headers)


async def test_the_page_is_served_without_a_key_and_may_ask_only_its_router() -> None:
    kinds = {"/": "text/html", "/page/style.css": "text/css", "/page/app.js": "text/javascript"}
    for path, content in FILES.items():
        response = await get(path)
        assert (response.status_code, response.content) == (200, content)
        assert path not in kinds or response.headers["content-type"] == f"{kinds[path]}; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "unsafe" not in policy
        assert (await get(path, **{"If-None-Match": response.headers["etag"]})).status_code == 304
    for path in ("/v1/models", "/api/status", "/version"):
        assert (await get(path)).status_code == 401, "what is a tenant's still needs a key"
    assert (await get("/page/__init__.py")).status_code == 401, "nothing else of the folder is served"


def test_nothing_comes_from_elsewhere() -> None:
    for path, text in OURS.items():
        bare = re.sub(r"http://www\.w3\.org/2000/svg", "", text)
        assert not re.search(r"(?:https?:)?//[a-z0-9]", re.sub(r"(^|\s)// .*$", "", bare, flags=re.MULTILINE)), path
        assert not FORBIDDEN.search(text), path
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', TEXT)) >= {"page/app.js", "page/style.css", "page/uPlot.min.css"}
    assert {f"/{name}" for name in re.findall(r'(?:src|href)="(page/[^"]+)"', TEXT)} <= FILES.keys()
    assert {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', SCRIPTS)} <= FILES.keys()
    assert "/metrics" not in re.sub(r'"/api/metrics"', "", SCRIPTS), "its figures come from /api"


def test_the_library_is_the_one_that_its_licence_is_of() -> None:
    assert FILES["/page/uPlot.iife.min.js"].startswith(b"/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
    assert b"The MIT License" in FILES["/page/uPlot.LICENSE"]


class Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.labelled: list[str] = []
        self.language = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if found := given.get("id"):
            self.ids.append(found)
        self.labelled += [given["aria-labelledby"] or ""] if "aria-labelledby" in given else []
        self.language = given.get("lang") or self.language if tag == "html" else self.language


def test_the_scripts_find_their_places_in_the_page() -> None:
    outline = Outline()
    outline.feed(TEXT)
    assert outline.language == "en"
    assert len(set(outline.ids)) == len(outline.ids)
    assert set(outline.labelled) <= set(outline.ids)
    asked = set(re.findall(r"byId\(\"([\w-]+)\"", SCRIPTS))
    assert len(asked) > 10
    assert asked <= set(outline.ids)
    assert 'role="alert"' in TEXT


def figures(code: str, value: Any = None) -> Any:
    """What a piece of JavaScript makes of a value, `given`, with figures.js, which is `f`."""
    module = base64.b64encode(OURS["/page/figures.js"].encode()).decode()
    program = f"""
        const f = await import("data:text/javascript;base64,{module}");
        const {{ readFileSync }} = await import("node:fs");
        const given = JSON.parse(readFileSync(0, "utf8"));
        process.stdout.write(JSON.stringify(await (async () => {{ {code} }})()) ?? "null");
    """
    assert NODE
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", program],
        input=json.dumps(value), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


NOW_S = 10_005.0
"""Half of slot 1000, of ten seconds, is over."""
OVERVIEW = """
    const slots = f.remember(new Map(), given);
    return f.overview(slots, { nowS: given.now_s, slotS: given.slot_s, spanS: 300, bounds: given.bounds });
"""


def answer(*slots: tuple[int, Mapping[str, float]], now_s: float = NOW_S, **bounds: list[float]) -> dict[str, Any]:
    """An answer of /api/history."""
    listed = [{"slot": number, "num_routers": 1, "counts": dict(counts)} for number, counts in slots]
    return {"now_s": now_s, "slot_s": 10, "bounds": bounds, "slots": listed}


COUNTS = {
    "requests/met/default": 30, "requests/ttft_missed/default": 6, "requests/rejected/default": 2,
    "requests/met/batch": 6, "requests/itl_missed/batch": 2, "requests/cancelled/batch": 50,
    "misses/prefill": 6, "misses/decode": 2,
    "prompt_tokens": 400, "cached_tokens": 100, "seen_tokens": 200, "kv_bytes": 1000,
}  # fmt: skip


@needs_node
def test_the_overview_is_the_sum_of_the_slots() -> None:
    seen = figures(OVERVIEW, answer((999, COUNTS), (1000, {"requests/met/default": 4})))
    assert seen["total"] == {
        "offered": 100, "met": 40, "refused": 2, "errors": 0, "cancelled": 50, "late": 8, "ended": 50,
    }  # fmt: skip
    assert (seen["seconds"], seen["goodput"], seen["offered"]) == (15, pytest.approx(40 / 15), pytest.approx(100 / 15))
    assert (seen["attainment"], seen["hits"], seen["ceiling"]) == (0.8, 0.25, 0.5)
    assert seen["misses"] == [
        {"stage": "prefill", "count": 6, "share": 0.75},
        {"stage": "decode", "count": 2, "share": 0.25},
    ]
    batch, default = seen["classes"]
    assert (batch["name"], batch["attainment"], batch["others"]) == ("batch", 0.75, {"itl_missed": 2, "cancelled": 50})
    assert (default["ended"], default["others"]) == (42, {"ttft_missed": 6, "rejected": 2})
    lines = seen["lines"]
    assert (len(lines["at"]), lines["at"][-2:]) == (30, [10_000, NOW_S])
    assert lines["met"][-3:] == [None, 3.6, 0.8], "nobody lived before; of the slot that runs, half is over"
    assert seen["now"]["promptPerS"] == pytest.approx(400 / 15)


@needs_node
def test_what_has_only_begun_makes_no_peak() -> None:
    seen = figures(OVERVIEW, answer((999, COUNTS), (1000, {"requests/met/default": 4}), now_s=10_001.0))
    assert seen["lines"]["at"][-1] == 10_000
    assert seen["total"]["met"] == 36, "it is shown two seconds later"


@needs_node
def test_what_is_not_known_is_null() -> None:
    seen = figures(OVERVIEW, answer())
    unknown = ("goodput", "attainment", "hits", "ceiling")
    assert {name: seen[name] for name in unknown} == dict.fromkeys(unknown)
    assert (seen["misses"], seen["classes"], seen["ttft"]) == ([], [], {"p50": None, "p99": None})


@needs_node
def test_a_value_without_a_neighbour_is_drawn_as_a_point() -> None:
    """A line needs two: with a request a minute the charts were empty."""
    values = [0.3, None, 1, 2, None, None, 4, None]
    assert figures("return [f.lone(given), f.lone([]), f.lone([undefined, 5])];", values) == [[0, 6], [], [1]]


@needs_node
def test_slots_are_replaced_and_an_hour_of_them_is_kept() -> None:
    code = """
        let kept = f.remember(new Map(), given[0]);
        kept = f.remember(kept, given[1]);
        return [...kept].map(([slot, each]) => [slot, each.counts.x]);
    """
    first = answer((641, {"x": 1}), (640, {"x": 1}), (999, {"x": 2}))
    assert figures(code, [first, answer((999, {"x": 3}), (1000, {"x": 4}))]) == [[641, 1], [999, 3], [1000, 4]]


@needs_node
def test_quantiles_are_those_of_prometheus_and_of_the_terminal() -> None:
    metrics = RequestMetrics()
    for value, times in ((0.0004, 5), (0.03, 5), (0.09, 70), (0.3, 19), (1e9, 1)):
        metrics.time_to_first_token.record(value, times=times)
    bounds = list(metrics.time_to_first_token.bounds)
    code = """
        const found = [0.04, 0.5, 0.98, 1].map((q) => f.quantile(q, given.counts, "ttft", { ttft: given.bounds }));
        return [found, found.map(f.latencyText), f.quantile(0.5, {}, "ttft", {})];
    """
    found, texts, none = figures(code, {"counts": counted(metrics)[""], "bounds": bounds})
    ends, total, cumulative = metrics.time_to_first_token.totals()[()], 0, {}
    for bound, count in ends.items():
        total += count
        cumulative[float(bound)] = float(total)
    for each, q in zip(found, (0.04, 0.5, 0.98, 1), strict=True):
        expected = quantile(q, cumulative)
        assert isinstance(expected, Quantile)
        assert each["value"] == pytest.approx(expected.value)
        assert (each["isBelow"], each["isAbove"]) == (expected.is_below, expected.is_above) == (q == 0.04, q == 1)
    assert texts[0].startswith("< "), "what lies below the first bound is not shown as the bound"
    assert texts[3].startswith("> "), "what lies above the last bound is not shown as the bound"
    assert none is None


@needs_node
def test_first_tokens_of_long_prompts_do_not_hide_those_of_short_ones() -> None:
    metrics = RequestMetrics()
    for num_to_compute, seconds in ((10, 0.03), (10, 0.03), (10, 0.03), (5680, 38.0)):
        metrics.time_to_first_token.record(seconds, {TO_COMPUTE: prompt_class(num_to_compute)})
    bounds = {"ttft": list(metrics.time_to_first_token.bounds), "ttft_of": [256.0, 1024.0, 4096.0]}
    code = """
        const slots = f.remember(new Map(), given);
        const at = { nowS: given.now_s, slotS: given.slot_s, spanS: 300, bounds: given.bounds };
        return ["", "256", "+Inf"].map((prompts) => f.overview(slots, { ...at, prompts }));
    """
    whole, short, long = figures(code, answer((999, counted(metrics)[""])) | {"bounds": bounds})
    assert [(each["id"], each["name"], each["count"]) for each in whole["lengths"]] == [
        ("256", "up to 256", 3),
        ("1024", "257 to 1,024", 0),
        ("4096", "1,025 to 4,096", 0),
        ("+Inf", "above 4,096", 1),
    ]
    p99 = [each["first"]["p99"]["value"] for each in (whole, short, long)]
    assert p99[0] > 30
    assert p99[1] < 0.04
    assert p99[2] > 30
    assert whole["lengths"][0]["p99"]["value"] == p99[1]
    assert whole["lengths"][1]["p99"] is None
    assert [each["lines"]["ttftP99"][-1] for each in (whole, short, long)] == p99, "the chart is of the chosen ones"
    assert {each["ttft"]["p99"]["value"] for each in (whole, short, long)} == {p99[0]}, "the tile is of all"


STATUS: dict[str, Any] = {
    "now_s": 100.0, "version": "1", "not_ready": "", "routers": [{"id": "r0", "pid": 1, "version": "1"}],
    "pools": {"decode": {"desired": 2, "ready": 2}, "prefill": {"desired": 1, "ready": 1}},
    "workers": [{"id": "w0", "pid": 5, "version": "1", "self_check": "ok", "computed_tokens": 100}],
    "redis": {"ok": True}, "controller": {"pid": 1}, "models": [],
}  # fmt: skip


@needs_node
@pytest.mark.parametrize(
    ("changed", "level", "text"),
    [
        ({}, "good", "all components healthy"),
        ({"not_ready": "no worker is ready"}, "bad", "requests not served"),
        ({"redis": {"ok": False}}, "bad", "redis lost"),
        ({"controller": None}, "warn", "controller none"),
        ({"pools": {"decode": {"desired": 2, "ready": 1}}}, "warn", "decode 1 of 2"),
        ({"pools": {"decode": {"desired": 2, "ready": 0}}}, "bad", "decode 0 of 2"),
        ({"routers": [{"id": "r0", "pid": 1, "version": "2"}]}, "warn", "versions 2"),
        ({"workers": [{"id": "w0", "pid": 5, "version": "1", "self_check": "3 blocks"}]}, "bad", "self-check failed"),
    ],
)
def test_health_names_what_is_not_well(changed: dict[str, Any], level: str, text: str) -> None:
    assert figures("return f.health(f.parts(given))", STATUS | changed) == {"level": level, "text": text}


def alert(name: str, severity: str = "critical", *, is_firing: bool = True) -> dict[str, Any]:
    return {
        "name": name, "severity": severity, "about": "decode", "summary": "Pool decode has no worker that is ready",
        "since_s": 10.0, "for_s": 60, "is_firing": is_firing,
    }  # fmt: skip


@needs_node
def test_alerts_say_since_when_and_what_to_read() -> None:
    pending = alert("BatonPoolBelowDesired", "warning", is_firing=False)
    firing, waiting = figures("return f.alertLines(given, 100)", [alert("BatonPoolEmpty"), pending])
    assert firing == {
        "key": "BatonPoolEmpty/decode", "name": "BatonPoolEmpty", "level": "bad", "word": "critical",
        "summary": "Pool decode has no worker that is ready", "lasts": "for 1 min",
        "page": "docs/runbook/BatonPoolEmpty.md",
    }  # fmt: skip
    assert (waiting["level"], waiting["word"]) == ("soft", "pending")
    assert waiting["lasts"] == "for 1 min, fires after 1 min"


@needs_node
@pytest.mark.parametrize(
    ("alerts", "level", "text"),
    [
        ([alert("BatonPoolEmpty"), alert("BatonTokensSlow", "warning")], "bad", "BatonPoolEmpty"),
        ([alert("BatonTokensSlow", "warning")], "warn", "BatonTokensSlow"),
        ([alert("BatonPoolEmpty", is_firing=False)], "good", "all components healthy"),
    ],
)
def test_health_names_the_alerts_that_fire(alerts: list[dict[str, Any]], level: str, text: str) -> None:
    code = "return f.health(f.parts(given[0]), given[1])"
    assert figures(code, [STATUS, alerts]) == {"level": level, "text": text}


@needs_node
def test_the_load_says_how_much_there_may_be_and_what_is_nearly_full() -> None:
    load = {
        "cpu_share": 0.97, "long_cpu_share": 0.1, "loop_lag_s": 0.012, "memory_bytes": 150 * 2**20,
        "open_files": 81, "max_files": 100, "connections": 3, "max_connections": 8192,
        "in_flight": 7, "max_in_flight": 0,
    }  # fmt: skip
    assert [(each["name"], each["value"], each["level"]) for each in figures("return f.loadFigures(given)", load)] == [
        ("processor", "97 %", "warn"),
        ("event loop lag", "12 ms", ""),
        ("memory", "150 MiB", ""),
        ("responses in flight", "7", ""),
        ("connections", "3 of 8,192", ""),
        ("files", "81 of 100", "warn"),
    ]


@needs_node
def test_rates_are_of_the_same_process() -> None:
    later = STATUS | {
        "now_s": 104.0,
        "workers": [
            {"id": "w0", "pid": 5, "computed_tokens": 140},
            {"id": "w1", "pid": 6, "computed_tokens": 9},
        ],
    }
    code = "return f.rates(given[0], given[1], 'workers', (worker) => worker.computed_tokens)"
    assert figures(code, [STATUS, later]) == {"w0": 10, "w1": None}
    assert figures(code, [None, STATUS]) == {"w0": None}
    again = STATUS | {"now_s": 104.0, "workers": [{"id": "w0", "pid": 7, "computed_tokens": 200}]}
    assert figures(code, [STATUS, again]) == {"w0": None}, "it has begun anew"


def served(release: str, state: str = "ready", **more: Any) -> dict[str, Any]:
    """A model as /api/status has it."""
    pools = {"prefill": {"desired": 1, "ready": 1}, "decode": {"desired": 2, "ready": 2}}
    none = {"prefill": {"desired": 0, "ready": 0}, "decode": {"desired": 0, "ready": 0}}
    controller = {"pid": 1, "scaling": [{"pool": "decode", "utilisation": 0.5, "wanted": 3}]}
    defaults = {
        "id": "m", "release": release, "content_id": f"id of {release}", "share": 1.0, "state": state, "held": 0,
        "wake_s": 0.0, "pools": none if state == "asleep" else pools, "controller": controller,
    }  # fmt: skip
    return defaults | more


def routed(release: str, met: int) -> dict[str, Any]:
    return {"content_id": f"id of {release}", "met": met, "missed": 1, "rejected": 0}


SEVERAL: dict[str, Any] = {
    **STATUS,
    "controller": None,
    "models": [served("m-1", share=3.0), served("m-2"), served("big/1", "asleep", id="big", wake_s=41.2, held=2)],
    "workers": [{**STATUS["workers"][0], "release": release} for release in ("m-1", "m-2")],
    "routers": [
        {**STATUS["routers"][0], "met": 9, "missed": 2, "rejected": 5, "models": [routed("m-1", 2), routed("m-2", 7)]}
    ],
    "alerts": [
        {"name": name, "about": about}
        for name, about in (
            ("A", "m-1/decode"), ("B", "m-2"), ("C", "m-2/w0 (decode)"), ("D", ""), ("E", "router-0"),
            ("F", "big/1/decode"),
        )
    ],
}  # fmt: skip


@needs_node
def test_of_several_models_one_can_be_shown() -> None:
    code = """return ["m-2", "", "gone"].map((release) => f.ofModel(given, release))"""
    one, whole, gone = figures(code, SEVERAL)
    assert whole == gone == SEVERAL
    assert [each["release"] for each in one["models"] + one["workers"]] == ["m-2", "m-2"]
    assert (one["pools"], one["controller"]) == (SEVERAL["models"][1]["pools"], SEVERAL["models"][1]["controller"])
    (router,) = one["routers"]
    assert (router["id"], router["met"], router["missed"], router["rejected"]) == ("r0", 7, 1, 0)
    assert [each["name"] for each in one["alerts"]] == ["B", "C", "D", "E"]
    asleep = figures("""return f.ofModel(given, "big/1")""", SEVERAL)
    assert [each["name"] for each in asleep["alerts"]] == ["D", "E", "F"]
    assert asleep["routers"][0]["met"] == 0, "the router does not serve it"
    assert figures("return f.health(f.parts(f.ofModel(given, 'big/1')))", SEVERAL)["level"] == "good"


@needs_node
def test_a_model_that_is_down_is_shown_as_not_served_though_others_are() -> None:
    status = SEVERAL | {"models": [served("m-1"), served("m-2", "down")]}
    code = """return ["m-1", "m-2"].map((release) => f.health(f.parts(f.ofModel(given, release))))"""
    well, down = figures(code, status)
    assert well == {"level": "good", "text": "all components healthy"}
    assert down == {"level": "bad", "text": "requests not served"}


@needs_node
@pytest.mark.parametrize(
    ("models", "level", "value", "more"),
    [
        ([served("m-1"), served("m-2", "asleep")], "good", "1 ready, 1 asleep", ""),
        ([served("m-1", "waking"), served("m-2", "leaving")], "good", "1 waking, 1 leaving", ""),
        ([served("m-1"), served("m-2", "down")], "bad", "1 ready, 1 down", "m-2 is down"),
        (
            [served("m-1"), served("x", id="x", pools={"decode": {"desired": 2, "ready": 1}})],
            "warn",
            "2 ready",
            "x: decode 1 of 2",
        ),
        ([served("m-1"), served("x", id="x", controller=None)], "warn", "2 ready", "x has no controller"),
    ],
)
def test_the_health_of_several_models_is_one_part(
    models: list[dict[str, Any]], level: str, value: str, more: str
) -> None:
    found = {each["name"]: each for each in figures("return f.parts(given)", SEVERAL | {"models": models})}
    assert found["Models"] == {"name": "Models", "level": level, "value": value, "more": more}
    assert not {"Decode", "Prefill", "Controller"} & found.keys(), "each model has its own"


@needs_node
def test_models_say_their_state_share_and_how_long_they_wake() -> None:
    big, first, second = figures("return f.modelLines(given.models, given.models)", SEVERAL)
    assert (big["name"], big["state"], big["level"], big["canWake"]) == ("big", "asleep", "soft", True)
    assert big["facts"] == ["no workers", "2 requests held", "woke in 41.2 s last time"]
    stuck = SEVERAL | {"models": [served("big/1", "waking", id="big", problem="no node has room")]}
    (shown,) = figures("return f.modelLines(given.models, given.models)", stuck)
    assert shown["facts"][-1] == "does not wake: no node has room"
    assert (first["name"], first["level"], first["canWake"]) == ("m-1", "good", False)
    assert first["facts"] == ["75 % of the sessions", "prefill 1 of 1, decode 2 of 2"]
    assert second["facts"][0] == "25 % of the sessions"
    code = "return given.map((models) => f.isListed(models))"
    assert figures(code, [[], [served("m-1")], [served("m-1", "asleep")], SEVERAL["models"]]) == [
        False,
        False,
        True,
        True,
    ]
    names = figures("return f.modelNames(given)", SEVERAL["models"])
    assert names == [
        {"release": "big/1", "name": "big"},
        {"release": "m-1", "name": "m-1"},
        {"release": "m-2", "name": "m-2"},
    ]  # fmt: skip


@needs_node
def test_pools_are_those_of_their_model() -> None:
    one = figures("return f.poolLines(given)", [served("m-1")])
    assert [(each["title"], each["text"], each.get("wanted")) for each in one] == [
        ("Prefill pool", "prefill pool", None), ("Decode pool", "decode pool", 3),
    ]  # fmt: skip
    several = figures("return f.poolLines(given)", [served("m-1"), served("x", id="x", controller=None)])
    assert [(each["release"], each["title"], each["text"]) for each in several] == [
        ("m-1", "m: prefill pool", "prefill pool of m"), ("m-1", "m: decode pool", "decode pool of m"),
        ("x", "x: prefill pool", "prefill pool of x"), ("x", "x: decode pool", "decode pool of x"),
    ]  # fmt: skip
    assert len({each["key"] for each in several}) == 4


@needs_node
def test_workers_of_one_id_are_told_apart_by_their_model() -> None:
    def status(now_s: float, *tokens: int) -> dict[str, Any]:
        workers = [
            {"id": "w0", "pid": 5, "release": f"m-{number}", "computed_tokens": each}
            for number, each in enumerate(tokens)
        ]
        return {"now_s": now_s, "workers": workers}

    code = "return f.rates(given[0], given[1], 'workers', (worker) => worker.computed_tokens)"
    assert figures(code, [status(100, 10, 100), status(104, 50, 108)]) == {"m-0/w0": 10, "m-1/w0": 2}


@needs_node
def test_numbers_are_short_and_say_their_units() -> None:
    code = """return [
        f.short(null), f.short(0), f.short(0.456), f.short(12.34), f.short(123456), f.percent(0.9999), f.percent(0.5),
        f.duration(0.0042), f.duration(0.42), f.duration(4.2), f.duration(420), f.rateOfBytes(5000), f.rateOfBytes(3e6),
        f.age(5), f.age(65), f.age(3700), f.age(90000), f.age(-1), f.tick(0.1), f.tick(60), f.tick(600),
    ]"""
    assert figures(code) == [
        "–", "0", "0.46", "12.3", "123.5k", "100.0 %", "50 %",
        "4.2 ms", "420 ms", "4.20 s", "420 s", "4.9 KiB/s", "2.9 MiB/s",
        "5 s", "1 min", "1 h 1 min", "1 d 1 h", "–", "100 ms", "60 s", "10 min",
    ]  # fmt: skip
