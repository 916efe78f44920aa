"""The page in a browser, on two routers of one cluster: what it shows, what it asks, and that a key gives orders.

One browser and one fleet are shared by the file. All views at both widths and in both colour schemes are in `make
chaos`; here each view is opened once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.blocks import content_id
from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.chaos.fleet import Fleet, running_fleet
from tests.support import request_lists
from tests.support.asking import metric
from tests.support.browsing import WAIT_MS, browser, is_too_wide, needs_chromium, opened_page, serious
from tests.support.operator import OPERATOR_ENTRY, OPERATOR_KEY
from tests.support.ordered import ordered

pytestmark = needs_chromium
TENANT_KEY = "key-of-acme"
VIEWS = ("overview", "requests", "workers", "playground", "api")
SHOWN = {
    "overview": "Where work is now",
    "requests": "where the time went",
    "workers": "Decode pool",
    "playground": "The same, from code",
    "api": "/v1/chat/completions",
}
"""A view -> a text by which it is known to be drawn."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Fleet]:
    """Two routers, a prefill worker and two decode workers, a tenant and an operator."""
    path = tmp_path_factory.mktemp("page") / "tenants.yaml"
    path.write_text(f"acme: {{key_sha256: ['{hashlib.sha256(TENANT_KEY.encode()).hexdigest()}']}}{OPERATOR_ENTRY}")
    router = RouterConfig(mode="disaggregated", tenants_file=str(path))
    with running_fleet(TransferConfig(), router, num_routers=2) as running:
        running.wait_for(*[running.add(role) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)])
        with ordered(running.redis.url, content_id(running.config.kv_identity), prefill=1, decode=2):
            yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


def url(fleet: Fleet) -> str:
    return f"http://{fleet.routers[0].http}/"


def generate(fleet: Fleet, path: str = "completions", router: int = 0, **body: Any) -> None:
    """Sends one of the routers a request, and reads the answer."""
    headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    address = f"http://{fleet.routers[router].http}/v1/{path}"
    httpx2.post(address, json=body, headers=headers, timeout=60).raise_for_status()


def show(page: Any, fleet: Fleet, view: str) -> None:
    """Opens a view and waits until it is drawn."""
    page.goto(f"{url(fleet)}#{view}")
    page.get_by_text(SHOWN[view]).first.wait_for()
    page.locator("nav a[aria-current]", has_text=view if view != "api" else "API").wait_for()
    page.get_by_text("all components healthy").first.wait_for(state="attached")


def test_every_view_is_shown_and_every_part_of_it_can_be_used(fleet: Fleet, chromium: Any) -> None:
    generate(fleet, prompt="Hello", max_tokens=4)
    with opened_page(chromium, url(fleet), key=OPERATOR_KEY) as page:
        answer_for_requests(page)
        for view in VIEWS:
            show(page, fleet, view)
            assert serious(page) == [], view
            assert not is_too_wide(page), view
        show(page, fleet, "requests")
        page.get_by_role("link", name="chatcmpl").first.click()
        page.get_by_text("failed on worker-1 (decode) after 31 tokens").wait_for()
        page.get_by_text("Predicted and measured").wait_for()


def answer_for_requests(page: Any) -> None:
    """Has the browser answer for the list of requests, with every outcome."""
    page.route("**/api/requests?*", lambda route: route.fulfill(json=request_lists.answer()))
    page.route("**/api/requests/*", lambda route: route.fulfill(json=request_lists.detail()))


def test_a_request_leads_from_the_playground_to_its_time_line(fleet: Fleet, chromium: Any) -> None:
    with opened_page(chromium, url(fleet), key=OPERATOR_KEY) as page:
        show(page, fleet, "playground")
        page.get_by_role("radio", name="Completion").check()
        page.get_by_role("button", name="Send").click()
        page.get_by_role("link", name="Timeline").click()
        page.get_by_text("finished after 128 tokens").wait_for()
        assert page.locator("ol.events li").count() > 4
        page.get_by_label("Outcome").select_option("failed")
        page.get_by_text("No requests yet").wait_for()
        page.get_by_label("Outcome").select_option("met")
        page.get_by_role("link", name="cmpl-").first.wait_for()


def test_the_playground_streams_and_says_where_the_time_went(fleet: Fleet, chromium: Any) -> None:
    with opened_page(chromium, url(fleet), key=OPERATOR_KEY) as page:
        show(page, fleet, "playground")
        page.evaluate(
            "window.grown = new Set(); new MutationObserver(() => grown.add(document.querySelector('.say.assistant')"
            "?.textContent.length)).observe(document.querySelector('.talk'), {childList: true, subtree: true})"
        )
        page.get_by_role("button", name="Send").click()
        page.get_by_text("Timeline").wait_for()
        assert page.evaluate("grown.size") > 3, "the answer came bit by bit"
        told = page.locator(".figures").inner_text()
        assert "(prefill) → worker-" in told
        assert "128 tokens" in told
        assert page.locator(".stages").get_attribute("aria-label").startswith("queue ")
        body = json.loads(page.locator("pre.code").inner_text().split("-d '", 1)[1].removesuffix("'"))
        assert body["messages"][-1]["content"] == "What is the capital of France?"
        generate(fleet, "chat/completions", **body)
        for name, said in (("Python", "from openai import OpenAI"), ("gRPC", "baton.v1.Inference/Generate")):
            page.get_by_role("button", name=name).click()
            assert said in page.locator("pre.code").inner_text()


SUMMED = {"prompt_tokens": "baton_prompt_tokens_total", "generated_tokens": "baton_generation_tokens_total"}
"""A name in the history -> the metric."""


def test_its_figures_are_those_of_the_metrics_of_both_routers(fleet: Fleet, chromium: Any) -> None:
    for number in range(12):
        generate(fleet, router=number % 2, prompt=f"Once {number}", max_tokens=3)
    with opened_page(chromium, url(fleet), key=OPERATOR_KEY) as page:
        show(page, fleet, "overview")
        met = [metric(router, "baton_requests_slo_total", 'outcome="met"') for router in fleet.routers]
        assert all(met), "both have served some"
        page.get_by_text(f"{sum(met):.0f} of {sum(met):.0f} requests").wait_for()
        slots = page.evaluate(
            "fetch('api/history', {headers: {Authorization: 'Bearer ' + sessionStorage.getItem('baton-api-key')}})"
            ".then((answer) => answer.json()).then((answer) => answer.slots)"
        )
        for name, of in SUMMED.items():
            shown = sum(slot["counts"].get(name, 0) for slot in slots)
            assert shown == sum(metric(router, of) for router in fleet.routers) > 0


def answer_for_models(page: Any) -> tuple[list[str], list[Any]]:
    """Has the browser answer for a router of several models: the fleet's own, a second release of it, and another one
    that sleeps. Returns what is asked of the router by model, and the orders.
    """
    asked: list[str] = []
    orders: list[Any] = []

    def status(route: Any) -> None:
        found = route.fetch().json()
        (own,) = found["models"]
        none = {name: {"desired": 0, "ready": 0, "engine": []} for name in own["pools"]}
        second = own | {"release": "second", "content_id": "second", "pools": none, "share": 0.25}
        sleeper = {"id": "sleeper", "release": "sleeper-1", "content_id": "sleeper", "state": "asleep", "pools": none}
        found["models"] += [second, own | sleeper | {"held": 3, "wake_s": 41.0}]
        route.fulfill(json=found)

    def by_model(route: Any) -> None:
        url = route.request.url
        if "model=" not in url:
            route.continue_()
            return
        asked.append(url.partition("/api/")[2])
        route.fulfill(json=route.fetch(url=re.sub(r"&?model=[^&]*", "", url)).json())

    def order(route: Any) -> None:
        orders.append((route.request.url.partition("/api/")[2], route.request.post_data_json))
        route.fulfill(json={})

    page.route("**/api/status", status)
    page.route(re.compile("/api/(history|requests)[?]"), by_model)
    page.route(re.compile("/api/(models|pools)/"), order)
    return asked, orders


def test_with_one_model_there_is_nothing_to_choose(fleet: Fleet, chromium: Any) -> None:
    with opened_page(chromium, url(fleet), key=OPERATOR_KEY) as page:
        show(page, fleet, "overview")
        assert not page.locator("#models").is_visible()
        assert not page.get_by_role("region", name="Models").is_visible()


def test_one_of_several_models_can_be_shown_and_woken(fleet: Fleet, chromium: Any) -> None:
    own = fleet.client.status()["models"][0]
    generate(fleet, prompt="Hello", max_tokens=4)
    with opened_page(chromium, url(fleet), key=OPERATOR_KEY) as page:
        asked, orders = answer_for_models(page)
        page.goto(f"{url(fleet)}#overview")
        select, card = page.locator("#models"), page.get_by_role("region", name="Models")
        select.wait_for()
        named = [own["release"], f"{own['id']} · second", "sleeper"]
        assert sorted(select.locator("option").all_inner_texts()) == sorted(["all 3 models", *named])
        card.get_by_text("no workers · 3 requests held · woke in 41.0 s last time").wait_for()
        card.get_by_text("20 % of the sessions").wait_for()
        page.get_by_role("list", name="Decode workers").get_by_text(f"{own['release']}/worker-").first.wait_for()
        assert serious(page) == []
        select.select_option("sleeper-1")
        page.get_by_text("no decode worker").wait_for()
        assert card.get_by_role("listitem").inner_text().startswith("asleep")
        card.get_by_role("button", name="Wake…").click()
        page.get_by_role("button", name="Wake it").click()
        page.get_by_text("sleeper wakes").wait_for()
        assert orders.pop() == ("models/wake", {"model": "sleeper-1"})
        page.reload()
        page.get_by_text("no decode worker").wait_for()
        assert select.input_value() == "sleeper-1", "the choice stays"
        page.get_by_role("link", name="Playground").click()
        assert page.locator("main").get_by_role("combobox").input_value() == "sleeper"
        assert '"model": "sleeper"' in page.locator("pre.code").inner_text()
        page.get_by_role("link", name="Workers").click()
        page.get_by_text("No workers are known.").wait_for()
        select.select_option(own["release"])
        page.get_by_role("region", name="worker-2", exact=True).wait_for()
        select.select_option("")
        pool = page.locator("section", has=page.get_by_role("heading", name=f"{named[1]}: decode pool"))
        pool.get_by_role("spinbutton").fill("1")
        pool.get_by_role("button", name="Scale…").click()
        page.get_by_role("button", name="Scale to 1").click()
        page.get_by_text(f"Scaling the decode pool of {named[1]} to 1").wait_for()
        assert orders.pop() == ("pools/decode", {"workers": 1, "model": "second"})
        page.get_by_role("link", name="Requests").click()
        select.select_option(own["release"])
        page.get_by_role("link", name="cmpl-").first.wait_for()
        assert {f"history?since=0&model={name}" for name in ("sleeper-1", own["release"])} <= set(asked)
        assert any(each.startswith("requests?") and each.endswith(f"model={own['release']}") for each in asked)
        assert serious(page) == []
        page.set_viewport_size({"width": 400, "height": 900})
        for view in ("Requests", "Workers", "Playground", "Overview"):
            page.get_by_role("link", name=view).click()
            select.select_option("")
            assert not is_too_wide(page), view


@pytest.mark.chaos
def test_the_calls_that_are_shown_work_as_they_are(fleet: Fleet, chromium: Any) -> None:
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "BATON_API_KEY": OPERATOR_KEY}
    with opened_page(chromium, url(fleet), key=OPERATOR_KEY) as page:
        show(page, fleet, "playground")
        page.get_by_label("Prompt").fill('It\'s "quoted" – and $HOME')
        for kind, (name, command) in itertools.product(("Chat", "Completion"), CALLS.items()):
            page.get_by_role("radio", name=kind).check()
            page.get_by_role("button", name=name).click()
            code = page.locator("pre.code").inner_text()
            assert "quoted" in code
            done = subprocess.run(
                [*command, code], env=environment, capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, done.stderr
            assert len(done.stdout) > 100, done.stderr


CALLS = {"curl": ("bash", "-c"), "Python": (sys.executable, "-c"), "gRPC": ("bash", "-c")}
"""A language of the playground -> what runs it."""


ORDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Drain…": ("workers/worker-2/drain", {}),
    "Change to prefill…": ("workers/worker-2/role", {"role": "prefill"}),
    "Scale…": ("pools/prefill", {"workers": 3}),
}
"""A button of the page -> what it asks below /api, and with which body."""


def state_of(fleet: Fleet) -> tuple[str, str, int]:
    """What orders would change: the state and the role of worker-2, and the size of the prefill pool."""
    worker = fleet.routers[0].worker("worker-2")
    return worker["state"], worker["role"], fleet.client.status()["pools"]["prefill"]["desired"]


def use_key(page: Any, key: str) -> None:
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()


def press(page: Any, button: str) -> None:
    """Presses the button of an order, and leaves the question whether it is meant open."""
    pool = page.locator("section", has=page.get_by_role("heading", name="Prefill pool"))
    if button == "Scale…":
        pool.get_by_label("Workers of the prefill pool").fill(str(ORDERS[button][1]["workers"]))
    place = pool if button == "Scale…" else page.get_by_role("region", name="worker-2", exact=True)
    place.get_by_role("button", name=button).click()
    page.get_by_role("dialog").wait_for()


def test_orders_are_refused_without_an_operators_key(fleet: Fleet, chromium: Any) -> None:
    before = state_of(fleet)
    for key, status in (("", 401), (TENANT_KEY, 403)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for path, body in ORDERS.values():
            assert httpx2.post(f"{url(fleet)}api/{path}", json=body, headers=headers).status_code == status, path
    with opened_page(chromium, url(fleet), may_fail=(401, 403)) as page:
        page.goto(f"{url(fleet)}#workers")
        use_key(page, TENANT_KEY)
        page.get_by_text("This key has no operator rights.").wait_for()
        for button in ORDERS:
            assert page.get_by_role("button", name=button).count() == 0
        use_key(page, OPERATOR_KEY)
        page.get_by_role("region", name="worker-2", exact=True).wait_for()
        page.route(re.compile("api/(status|history)"), lambda route: None)  # what is shown stays
        page.evaluate(f"sessionStorage.setItem('baton-api-key', '{TENANT_KEY}')")
        for button in ORDERS:
            press(page, button)
            page.locator("#confirm-yes").click()
            page.get_by_text("Refused: ").wait_for()
            page.evaluate("document.getElementById('toast').textContent = ''")
    assert state_of(fleet) == before == ("ready", "decode", 1)


def test_orders_are_given_with_an_operators_key_once_they_are_confirmed(fleet: Fleet, chromium: Any) -> None:
    with opened_page(chromium, url(fleet), key=OPERATOR_KEY) as page:
        show(page, fleet, "workers")
        card = page.get_by_role("region", name="worker-2", exact=True)
        card.get_by_role("button", name="Log").click()
        card.get_by_text("worker-2 joins at").wait_for()
        before = state_of(fleet)
        for button in ORDERS:
            press(page, button)
            page.get_by_role("button", name="Cancel").click()
        assert state_of(fleet) == before, "none was confirmed"
        press(page, "Scale…")
        page.get_by_role("button", name="Scale to 3").click()
        page.get_by_text("Scaling the prefill pool to 3", exact=True).wait_for()
        page.get_by_text("1 of 3", exact=True).wait_for()
        press(page, "Change to prefill…")
        page.get_by_role("button", name="Change to prefill", exact=True).click()
        page.get_by_text("worker-2 is a prefill worker now", exact=True).wait_for()
        card.get_by_role("button", name="Change to decode…").wait_for()
        assert state_of(fleet) == ("ready", "prefill", 3)
        card.get_by_role("button", name="Drain…").focus()
        page.keyboard.press("Enter")
        page.get_by_text("Drain worker-2 (prefill)?").wait_for()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.get_by_text("worker-2 drains", exact=True).wait_for()
        card.get_by_text("draining", exact=True).wait_for()
        assert fleet.routers[0].worker("worker-2")["state"] == "draining"


@pytest.mark.chaos
def test_all_views_at_all_widths_and_in_both_schemes(fleet: Fleet, chromium: Any) -> None:
    for width, scheme in itertools.product((400, 1280), ("light", "dark")):
        with opened_page(chromium, url(fleet), width=width, scheme=scheme, key=OPERATOR_KEY) as page:
            page.set_default_timeout(2 * WAIT_MS)
            answer_for_requests(page)
            for view in VIEWS:
                page.goto(f"{url(fleet)}#{view}")
                page.get_by_text(SHOWN[view]).first.wait_for(state="attached")
                assert serious(page) == [], (view, width, scheme)
                assert not is_too_wide(page), (view, width, scheme)
