"""The page at /: it is served to everybody, asks nobody but its router, and reads metrics as Prometheus does."""

from __future__ import annotations

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
from deploy.operator.scrape import parse
from deploy.operator.watch import ITL, TTFT, Quantile, quantile
from router.api.http import create_app
from router.api.page import PAGE
from tests.unit.deploy.operator.test_watch import AFTER, BEFORE, late_answers

TEXT = PAGE.decode()
FIGURES = re.search(r'<script id="figures">(.*?)</script>', TEXT, re.DOTALL)
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node, which runs the page's script")


def refusing(key: str | None, certificate: Any) -> Any:
    raise Unauthenticated("an API key is needed")


async def get(path: str) -> httpx2.Response:
    service: Any = SimpleNamespace()
    tenants: Any = SimpleNamespace(is_open=False, identify=refusing)
    app = create_app(service, tenants, lambda: "", lambda: b"")
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://baton") as client:
        return await client.get(path)


async def test_the_page_is_served_without_a_key_and_may_ask_only_its_router() -> None:
    response = await get("/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert response.content == PAGE
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert (await get("/v1/models")).status_code == 401, "what is a tenant's still needs one"


def test_nothing_comes_from_elsewhere() -> None:
    assert not re.search(r"(?:https?:)?//[a-z0-9]", re.sub(r"^\s*//.*$|[^:]// .*$", "", TEXT, flags=re.MULTILINE))
    assert not re.search(r"\b(?:src|href|action)\s*=\s*[\"'](?!data:,)", TEXT)
    assert not re.search(r"@import|url\(|import\s*\(|\bimport\s", TEXT)
    assert re.findall(r"fetch\(([^,)]*)", TEXT) == ['"api/metrics"']


class Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.labelled: list[str] = []
        self.unscoped = 0
        self.language = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if found := given.get("id"):
            self.ids.append(found)
        self.labelled += [given["aria-labelledby"] or ""] if "aria-labelledby" in given else []
        self.unscoped += tag == "th" and given.get("scope") not in ("col", "row")
        self.language = given.get("lang") or self.language if tag == "html" else self.language


def test_the_page_can_be_read_aloud_and_its_script_finds_its_places() -> None:
    outline = Outline()
    outline.feed(TEXT)
    assert (outline.language, outline.unscoped) == ("en", 0)
    assert len(set(outline.ids)) == len(outline.ids)
    assert set(outline.labelled) <= set(outline.ids)
    asked = set(re.findall(r"(?:byId|fill)\(\"([\w-]+)\"", TEXT))
    assert len(asked) > 10
    assert asked <= set(outline.ids)
    assert 'role="alert"' in TEXT
    assert "prefers-color-scheme: dark" in TEXT


def figures(*answers: tuple[float, str]) -> dict[str, Any]:
    """What the page shows after these answers of /metrics, by its own script."""
    assert FIGURES
    code = (
        FIGURES[1]
        + """
        const answers = JSON.parse(require("fs").readFileSync(0, "utf8"));
        let kept = [];
        for (const [at, text] of answers) kept = remember(kept, { at, samples: parseMetrics(text) });
        const shown = figures(kept);
        for (const each of shown.latencies) each.texts = [each.p50, each.p99].map(latencyText);
        process.stdout.write(JSON.stringify(shown));
        """
    )
    assert NODE
    done = subprocess.run(
        [NODE, "-e", code], input=json.dumps(answers), capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


BROWSER = """
const elements = new Map(), stored = new Map(), sent = [], shown = [];
const node = () => ({
  hidden: true, textContent: "", value: "", style: {}, append() {}, replaceChildren() {}, setAttribute() {},
  addEventListener(_, listener) { this.listener = listener; },
});
const place = (id) => elements.get(id) ?? elements.set(id, node()).get(id);
globalThis.document = { getElementById: place, createElement: node, createElementNS: node, title: "" };
const getItem = (name) => stored.get(name) ?? null, setItem = (name, value) => stored.set(name, value);
globalThis.sessionStorage = { getItem, setItem };
globalThis.Node = class {};
globalThis.setInterval = globalThis.setTimeout = () => {};
globalThis.fetch = async (path, { headers }) => {
  const key = headers.Authorization ?? "";
  sent.push([path, key]);
  const status = { "Bearer ops": 200, "Bearer acme": 403 }[key] ?? 401;
  return { status, ok: status === 200, text: async () => "baton_redis_up 1.0" };
};
(async () => {
  eval(SCRIPT + "; globalThis.again = ask");
  for (const key of ["", "acme", " ops "]) {
    if (key) {
      place("key").value = key;
      place("key-form").listener({ preventDefault() {} });
    }
    await again();
    const texts = ["ask-reason", "redis"].map((id) => place(id).textContent);
    shown.push([place("ask").hidden, place("lost").hidden, ...texts]);
  }
  process.stdout.write(JSON.stringify({ sent: sent.slice(1), shown, left: place("key").value }));
})();
"""
"""Enough of a browser for the page's script, which is SCRIPT, and a user who tries keys."""


@needs_node
def test_the_page_asks_for_an_operators_key_and_sends_it() -> None:
    script = "\n".join(re.findall(r"<script[^>]*>(.*?)</script>", TEXT, re.DOTALL))
    assert NODE
    done = subprocess.run(
        [NODE, "-e", f"const SCRIPT = {json.dumps(script)};{BROWSER}"],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["sent"] == [["api/metrics", ""], ["api/metrics", "Bearer acme"], ["api/metrics", "Bearer ops"]]
    assert seen["shown"] == [
        [False, True, "", ""],
        [False, True, "this key is no operator's", ""],
        [True, True, "this key is not known", "Redis ok"],
    ]
    assert seen["left"] == "", "the key is not left on the page"


CLUSTER = """
# HELP baton_pool_workers Workers of a pool, desired and ready.
# TYPE baton_pool_workers gauge
baton_pool_workers{pool="decode",state="desired"} 3.0
baton_pool_workers{pool="decode",state="ready"} 2.0
baton_autoscale_wanted_workers{pool="decode"} 4.0
baton_worker_ready{role="decode",worker="decode-0"} 1.0
baton_worker_ready{role="decode",worker="decode-1"} 0.0
baton_worker_ready{role="prefill",worker="prefill-0"} 0.0
baton_worker_state{role="decode",state="draining",worker="decode-1"} 1.0
baton_worker_state{role="decode",state="ready",worker="decode-1"} 0.0
baton_worker_info{block_size="16",engine="e",node="a \\"b\\" \\\\c",role="decode",sampler="s/1",worker="decode-0"} 1.0
baton_worker_self_check_ok{worker="decode-0"} 1.0
baton_worker_self_check_ok{worker="decode-1"} 0.0
baton_worker_sequences{role="decode",state="running",worker="decode-0"} 5.0
baton_worker_sequences{role="decode",state="waiting",worker="decode-0"} 2.0
baton_kv_blocks{role="decode",state="free",worker="decode-0"} 50.0
baton_kv_blocks{role="decode",state="cached",worker="decode-0"} 30.0
baton_kv_blocks{role="decode",state="in_use",worker="decode-0"} 20.0
baton_slo_objective_seconds{objective="ttft",slo_class="default"} 0.5
baton_slo_objective_seconds{objective="e2e",slo_class="default"} +Inf
baton_mirror_lag_seconds{router="router-0"} 1e-05
baton_mirror_lag_seconds{router="router-1"} 0.0
baton_redis_up 0.0
baton_build_info{version="0.1.0"} 1.0
"""


@needs_node
def test_requests_are_differences_of_two_answers() -> None:
    seen = figures((100.0, BEFORE), (110.0, AFTER))
    batch, default = seen["classes"]
    assert seen["goodput"] == pytest.approx(3.6)
    assert seen["line"] == [{"at": 110.0, "perS": pytest.approx(3.6)}]
    assert seen["attainment"] == pytest.approx(36 / 46)
    assert (batch["name"], batch["attainment"], batch["perS"]) == ("batch", 0.75, 0.6)
    assert batch["others"] == {"itl_missed": 2, "cancelled": 50}
    assert (default["name"], default["attainment"]) == ("default", pytest.approx(30 / 38))
    assert [(b["stage"], b["count"], b["share"]) for b in seen["blame"]] == [
        ("prefill", 6, 0.6), ("decode", 2, 0.2), ("queue", 2, 0.2),
    ]  # fmt: skip
    assert (seen["hitRate"], seen["hitCeiling"], seen["tokensPerS"]) == (0.25, 0.5, 30)


@needs_node
def test_quantiles_are_those_of_prometheus_and_of_the_terminal() -> None:
    seen = figures((0.0, BEFORE), (1.0, AFTER))
    first, between, _ = seen["latencies"]
    before, after = parse(BEFORE).buckets(TTFT), parse(AFTER).buckets(TTFT)
    counts: Mapping[float, float] = {bound: count - before[bound] for bound, count in after.items()}
    for found, q, value in ((first["p50"], 0.5, 0.1), (first["p99"], 0.99, 0.492)):
        assert found == {"value": pytest.approx(value), "isAbove": False}
        expected = quantile(q, counts)
        assert isinstance(expected, Quantile)
        assert expected.value == pytest.approx(value)
    assert first["texts"] == ["100 ms", "492 ms"]
    assert (between["p50"], between["p99"], between["texts"]) == (None, None, ["–", "–"])
    assert f'"{TTFT}"' in TEXT
    assert f'"{ITL}"' in TEXT


@needs_node
def test_what_lies_above_the_last_bound_is_not_shown_as_the_bound() -> None:
    before, after = late_answers()
    first, between, whole = figures((0.0, before), (1.0, after))["latencies"]
    assert first["texts"] == ["430.00 s", "> 600 s"]
    assert between["texts"] == ["19.47 s", "> 30 s"]
    assert (whole["texts"][1], whole["p99"]) == ("> 3,600 s", {"value": 3600, "isAbove": True})


@needs_node
def test_the_cluster_is_as_its_gauges_say() -> None:
    seen = figures((0.0, CLUSTER))
    assert seen["pools"] == [{"name": "decode", "desired": 3, "ready": 2, "wanted": 4}]
    well, sick, other = seen["workers"]
    assert well == {
        "worker": "decode-0", "role": "decode", "state": "ready", "isWell": True, "running": 5, "waiting": 2,
        "inUse": 0.2, "cached": 0.3, "node": 'a "b" \\c', "engine": "e, s/1",
    }  # fmt: skip
    assert (sick["state"], sick["isWell"], sick["inUse"]) == ("draining", False, None)
    assert other["state"] == "not ready"
    assert (seen["redis"], seen["version"], seen["routers"]) == (False, "0.1.0", 2)


@needs_node
def test_what_is_not_known_is_null() -> None:
    seen = figures((0.0, "x 1\n"))
    unknown = ("goodput", "attainment", "tokensPerS", "hitRate", "hitCeiling", "redis")
    assert {name: seen[name] for name in unknown} == dict.fromkeys(unknown)
    assert (seen["line"], seen["classes"], seen["blame"], seen["workers"]) == ([], [], [], [])


@needs_node
def test_a_router_that_starts_again_or_another_one_at_the_same_port_makes_no_peak() -> None:
    def answer(met: int, router: str) -> str:
        return (
            f'baton_requests_slo_total{{outcome="met",slo_class="default"}} {met}\n'
            f'baton_build_info{{router="{router}",version="1"}} 1.0\n'
        )

    restarted = figures((0.0, answer(1000, "r0")), (2.0, answer(4, "r0")), (4.0, answer(10, "r0")))
    assert (restarted["goodput"], restarted["line"]) == (3.0, [{"at": 4.0, "perS": 3.0}])
    two = figures((0.0, answer(1000, "r0")), (2.0, answer(0, "r1")), (4.0, answer(1008, "r0")))
    assert (two["goodput"], two["line"]) == (2.0, [{"at": 4.0, "perS": 2.0}])


@needs_node
def test_old_answers_are_forgotten() -> None:
    def answer(met: int) -> str:
        return f'baton_requests_slo_total{{outcome="met",slo_class="default"}} {met}\n'

    seen = figures(*((float(at), answer(at)) for at in range(0, 400, 2)))
    assert len(seen["line"]) == 150
    assert seen["spanS"] == 300
    assert seen["goodput"] == 1.0
