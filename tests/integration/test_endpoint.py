"""Three models behind one endpoint of two routers. The workers' engines are arithmetic; no Ray is needed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import httpx2
import openai
import pytest
import redis

from baton.blocks import content_id
from baton.cluster import ModelAnnouncement, Role
from baton.config import Config, RouterConfig, TransferConfig
from baton.trust import Principal
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import request
from tests.support.announcing import Announcer
from tests.support.members import keys_of, leased
from tests.support.operator import OPERATOR_ENTRY
from tests.support.waiting import wait_until

KEYS = {"everything": "key-of-everything", "one": "key-of-one", "few": "key-of-few"}
PROMPT = list(range(5, 5 + 96))
LONG = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
SHORT = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@dataclass
class Endpoint:
    """Two routers whose own model is `own`, and further models with their workers."""

    fleet: Fleet
    announcers: dict[str, Announcer]

    def config(self, revision: str) -> Config:
        """Of the workers of a model."""
        config = self.fleet.config
        return replace(config, model=replace(config.model, revision=revision))

    def content(self, revision: str) -> str:
        return content_id(self.config(revision).kv_identity)

    def key_of(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {KEYS[name]}"}

    def worker_of(self, revision: str, role: Role = Role.DECODE) -> str:
        """Starts a worker of a model, and returns its id when its lease is there."""
        worker_id = self.fleet.add(role, config=self.config(revision))
        wait_until(lambda: bool(self.leased(revision, worker_id)), 60, not_yet=(RuntimeError,))
        return worker_id

    def leased(self, revision: str, worker_id: str) -> Any:
        return leased(self.fleet.redis.url, self.content(revision), worker_id)

    @contextlib.contextmanager
    def announced(self, revision: str, files: str, name: str = "", **values: Any) -> Iterator[Announcer]:
        """A model that a controller announces."""
        sizes = values.pop("sizes", None)
        on_wake = values.pop("on_wake", lambda: None)
        model = ModelAnnouncement(
            content_id=self.content(revision),
            name=name or revision,
            path=f"/models/{revision}",
            release=f"{revision}-1",
            files=files,
            **values,
        )
        keys = keys_of(Principal.CONTROLLER, self.fleet.config.cluster.secret)
        with Announcer(model, self.fleet.redis.url, keys, sizes=sizes, on_wake=on_wake) as announcer:
            yield announcer

    def models(self, key: str = "everything", router: int = 0) -> list[str]:
        return [model.id for model in self.client(key, router).models.list()]

    def client(self, key: str = "everything", router: int = 0) -> openai.OpenAI:
        url = f"http://{self.fleet.routers[router].http}/v1"
        return openai.OpenAI(base_url=url, api_key=KEYS[key], max_retries=0, timeout=120)

    def generate(self, model: str, sampling: dict[str, Any] = SHORT, router: int = 0, **fields: Any) -> Any:
        """One request, read to its end."""
        asked = request(token_ids=fields.pop("prompt", PROMPT), model=model, sampling=sampling, **fields)
        metadata = (("authorization", f"Bearer {KEYS['everything']}"),)
        return list(self.fleet.routers[router].inference.Generate(asked, timeout=120, metadata=metadata))

    def tokens(self, *args: Any, **fields: Any) -> list[int]:
        return [token for message in self.generate(*args, **fields) for token in message.token_ids]

    def has(self, *names: str) -> bool:
        return all(set(names) <= set(self.models(router=number)) for number in range(len(self.fleet.routers)))


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    tenants.write_text(
        OPERATOR_ENTRY
        + f"everything: {{key_sha256: [{hashes['everything']}]}}\n"
        + f"one: {{key_sha256: [{hashes['one']}], models: [beta]}}\n"
        + f"few: {{key_sha256: [{hashes['few']}], requests_per_minute: 3}}\n"
    )
    router = RouterConfig(tenants_file=str(tenants), mode="auto", worker_wait_s=5.0, wake_wait_s=60.0)
    with running_fleet(TransferConfig(), router, num_routers=2, num_blocks=512, step_ms=20.0) as fleet:
        fleet.fill(Role.DECODE)
        yield Endpoint(fleet, {})


@pytest.fixture(scope="module")
def files(endpoint: Endpoint) -> str:
    """The digest of all models' files: they differ in their revisions only."""
    own = endpoint.fleet.config.model.revision
    digest: str = endpoint.leased(own, endpoint.fleet.started_as(Role.DECODE)[0]).files
    assert digest
    return digest


@pytest.fixture(scope="module")
def served(endpoint: Endpoint, files: str) -> Iterator[Endpoint]:
    """The endpoint with two more models, beta and gamma."""
    with endpoint.announced("beta", files) as beta, endpoint.announced("gamma", files) as gamma:
        endpoint.announcers = {"beta": beta, "gamma": gamma}
        for revision in ("beta", "gamma"):
            endpoint.worker_of(revision)
        wait_until(lambda: endpoint.has("beta", "gamma"), 30)
        yield endpoint


def test_the_openai_package_lists_and_uses_all_models(served: Endpoint) -> None:
    own = served.fleet.config.model.served_name
    assert served.models() == sorted([own, "beta", "gamma"])
    for name in served.models():
        for router in range(2):
            answer = served.client(router=router).chat.completions.create(
                model=name, messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
            assert answer.model == name
    with pytest.raises(openai.NotFoundError, match="did you mean 'beta'"):
        served.client().completions.create(model="betta", prompt="hi", max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="several models"):
        served.client().completions.create(model="", prompt="hi", max_tokens=1)


def test_a_tenant_limited_to_one_model_sees_one(served: Endpoint) -> None:
    assert served.models("one") == ["beta"]
    client = served.client("one")
    client.completions.create(model="beta", prompt="hi", max_tokens=1)
    with pytest.raises(openai.NotFoundError, match="use 'beta'"):
        client.completions.create(model="gamma", prompt="hi", max_tokens=1)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gamma")


def test_quotas_hold_over_all_models_and_routers(served: Endpoint) -> None:
    for number, model in enumerate(("beta", "gamma", "beta")):
        served.client("few", number % 2).completions.create(model=model, prompt="hi", max_tokens=1)
    with pytest.raises(openai.RateLimitError):
        served.client("few").completions.create(model="gamma", prompt="hi", max_tokens=1)


def test_a_prompt_of_one_model_never_finds_the_kv_of_another(served: Endpoint) -> None:
    prompt = list(range(300, 300 + 160))
    cached = []
    for model in ("beta", "beta", "gamma", served.fleet.config.model.served_name, "gamma"):
        *_, last = served.generate(model, prompt=prompt)
        cached.append(last.usage.cached_tokens)
        time.sleep(0.5)  # until the index has it
    assert [bool(number) for number in cached] == [False, True, False, False, True]


class Streams:
    """Answers of models that are read in threads while something happens."""

    def __init__(self, endpoint: Endpoint, models: list[str]) -> None:
        self.expected = {model: endpoint.tokens(model, LONG) for model in set(models)}
        self._pool = concurrent.futures.ThreadPoolExecutor(len(models))
        self._answers = [(model, self._pool.submit(endpoint.tokens, model, LONG)) for model in models]
        time.sleep(1.0)  # they have begun
        assert not any(answer.done() for _, answer in self._answers)

    def require_equal(self) -> None:
        """All streams ended as those that nothing disturbed."""
        found = [(model, answer.result(120)) for model, answer in self._answers]
        assert [(model, tokens == self.expected[model]) for model, tokens in found] == [(m, True) for m, _ in found]


def test_wiping_the_keys_of_one_model_disturbs_no_stream(served: Endpoint) -> None:
    streams = Streams(served, ["beta", "gamma"] * 3)
    with redis.Redis.from_url(served.fleet.redis.url) as store:
        wiped = [key for key in store.scan_iter() if served.content("beta").encode() in key]
        assert len(wiped) > 3
        store.delete(*wiped)
    streams.require_equal()
    assert served.has("beta", "gamma")
    assert served.tokens("beta", LONG) == streams.expected["beta"]


def test_killing_the_workers_of_one_model_disturbs_no_stream_of_the_others(served: Endpoint) -> None:
    own = served.fleet.config.model.served_name
    streams = Streams(served, [own, "gamma"] * 2)
    victim = next(each for each in served.fleet.started_as(Role.DECODE) if is_leased(served, "beta", each))
    served.fleet.remove(victim, signal.SIGKILL)
    streams.require_equal()
    served.worker_of("beta")
    assert served.tokens("beta", LONG) == streams.expected.get("beta", served.tokens("beta", LONG))


def is_leased(endpoint: Endpoint, revision: str, worker_id: str) -> bool:
    with contextlib.suppress(RuntimeError):
        return bool(endpoint.leased(revision, worker_id))
    return False


def test_a_new_model_is_served_within_ten_seconds_and_ends_after_its_streams(served: Endpoint, files: str) -> None:
    with served.announced("delta", files) as delta:
        assert not served.has("delta")
        served.worker_of("delta")
        began_s = time.monotonic()
        wait_until(lambda: served.has("delta"), 30)
        expected = served.tokens("delta", LONG)
        assert time.monotonic() - began_s < 10 + 20 * 0.2 + 5
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stream = pool.submit(served.tokens, "delta", LONG)
            time.sleep(1.0)
            delta.model = replace(delta.model, is_leaving=True)
            wait_until(lambda: not any("delta" in served.models(router=number) for number in range(2)), 10)
            assert not stream.done()
            with pytest.raises(grpc.RpcError) as refused:
                served.generate("delta")
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            assert stream.result(60) == expected


def test_a_canary_of_a_tenth_gets_a_tenth_of_the_sessions_and_a_session_stays(served: Endpoint, files: str) -> None:
    """Both releases have one name and one tokenizer; only their draws differ, and the metrics name the release."""
    with (
        served.announced("new", files, "two", share=1.0),
        served.announced("old", files, "two", share=9.0),
    ):
        for revision in ("new", "old"):
            served.worker_of(revision)
        wait_until(lambda: served.has("two"), 30)
        wait_until(lambda: len(releases(served, "two")) == 2, 30)
        with httpx2.Client(timeout=60) as client:

            def ask(session: int, router: int) -> None:
                url = f"http://{served.fleet.routers[router].http}/v1/completions"
                headers = served.key_of("everything") | {"x-session-id": f"session-{session}"}
                body = {"model": "two", "prompt": "hi", "max_tokens": 1}
                assert client.post(url, json=body, headers=headers).status_code == 200

            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda each: ask(each, each % 2), range(600)))
            counts = releases(served, "two")
            assert 0.08 <= counts["new-1"] / counts.total() <= 0.12, counts
            for _ in range(2):
                for router in range(2):
                    ask(7, router)
            more = releases(served, "two") - counts
            assert len(more) == 1, "the session stays with its release, at both routers"


def releases(endpoint: Endpoint, model: str) -> Counter[str]:
    """Finished requests of a name by release, at all routers; of known releases also without any."""
    status = endpoint.fleet.client.status()
    found = Counter(dict.fromkeys((each["release"] for each in status["models"] if each["id"] == model), 0))
    for router in endpoint.fleet.routers:
        for name, value in router.metrics():
            if name.startswith("baton_requests_total") and f'model="{model}"' in name and 'outcome="ok"' in name:
                found[name.partition('release="')[2].partition('"')[0]] += int(value)
    return found


# -- models that sleep -------------------------------------------------------------------------------------------------


class Sleeper:
    """A model that sleeps until a router wakes it. Its worker starts only when the test says so."""

    def __init__(self, endpoint: Endpoint, files: str) -> None:
        self._endpoint = endpoint
        self.num_starts = 0
        self._worker = ""
        self.may_start = threading.Event()
        asleep: dict[str, Any] = {
            "sizes": {"prefill": 0, "decode": 0},
            "is_asleep": True,
            "wake_s": 3.0,
            "on_wake": self._wake,
        }
        self.announced = endpoint.announced("sleeper", files, **asleep)

    def _wake(self) -> None:
        self.num_starts += 1
        threading.Thread(target=self._start, daemon=True).start()

    def _start(self) -> None:
        if self.may_start.wait(60):
            self._worker = self._endpoint.worker_of("sleeper")
            self.announcer.model = replace(self.announcer.model, is_asleep=False)

    def __enter__(self) -> Sleeper:
        self.announcer = self.announced.__enter__()
        wait_until(lambda: self._endpoint.has("sleeper"), 30)
        return self

    def __exit__(self, *of_error: object) -> None:
        self.announced.__exit__(None, None, None)
        if self._worker:
            self._endpoint.fleet.remove(self._worker, signal.SIGTERM)

    def shown(self) -> dict[str, Any]:
        status = self._endpoint.fleet.client.status()
        return next(each for each in status["models"] if each["id"] == "sleeper")


def test_two_hundred_requests_wait_for_a_model_that_sleeps(served: Endpoint, files: str) -> None:
    """None is lost, two routers wake it once, a cancelled one frees its place, and one decode worker serves them."""
    with Sleeper(served, files) as sleeper, concurrent.futures.ThreadPoolExecutor(200) as pool:
        assert sleeper.shown()["state"] == "asleep"
        for router in served.fleet.routers:
            assert httpx2.get(f"http://{router.http}/readyz").status_code == 200
        answers = [
            pool.submit(served.tokens, "sleeper", SHORT, number % 2, prompt=[5 + number, 6, 7]) for number in range(200)
        ]
        wait_until(lambda: sleeper.shown()["held"] == 200, 60, seen=sleeper.shown)
        assert sleeper.shown()["state"] == "waking"
        metadata = (("authorization", f"Bearer {KEYS['everything']}"),)
        call = served.fleet.inference.Generate(request(token_ids=PROMPT, model="sleeper"), metadata=metadata)
        wait_until(lambda: sleeper.shown()["held"] == 201, 10)
        call.cancel()
        wait_until(lambda: sleeper.shown()["held"] == 200, 10)
        sleeper.may_start.set()
        assert [len(answer.result(120)) for answer in answers] == [8] * 200
        assert sleeper.num_starts == 1
        assert sleeper.announcer.num_wakes >= 2, "each router asks"
        wait_until(lambda: sleeper.shown()["state"] == "ready", 10)
        assert sleeper.shown()["held"] == 0


def test_a_stream_that_waits_for_a_sleeping_model_gets_comments(served: Endpoint, files: str) -> None:
    with (
        Sleeper(served, files) as sleeper,
        httpx2.stream(
            "POST",
            f"http://{served.fleet.routers[0].http}/v1/completions",
            json={"model": "sleeper", "prompt": "hi", "max_tokens": 2, "stream": True},
            headers=served.key_of("everything"),
            timeout=60,
        ) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith(":"), "so that no proxy takes the connection for dead"
        sleeper.may_start.set()
        assert any(line == "data: [DONE]" for line in lines)


def test_status_says_what_each_model_does(served: Endpoint) -> None:
    status = served.fleet.client.status()
    models = {each["id"]: each for each in status["models"]}
    assert models["beta"]["state"] == "ready"
    assert models["beta"]["pools"]["decode"]["ready"] == 1
    assert json.dumps(models["beta"])
