"""Pools that change while they serve: scaled, drained, flipped, their keepers killed. On the arithmetic engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from typer.testing import CliRunner

from baton.config import Config
from baton.errors import BatonError, Conflict, InvalidRequest, NoController
from baton.trust import KeyFile, KeyRing, Principal, draw_secret, load_keys, write_private
from baton.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from deploy.cli.app import app
from deploy.operator.client import Client
from engine.testing import expected_tokens
from tests.integration.cluster import Cluster, running_cluster
from tests.support.asking import prompt_of, sampling
from tests.support.load import Clients, Requests, Stream
from tests.support.members import control, leased
from tests.support.processes import running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.first

NUM_CLIENTS = 5
NUM_TOKENS = 60
# Fewer sequences at a time than there are clients: one worker a pool is too few.
SETTINGS = {
    "testing_arithmetic": "true", "engine_num_blocks": "512", "engine_max_num_seqs": "4",
    "testing_step_ms": "10",
}  # fmt: skip
Status = dict[str, Any]


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    write_private(path, draw_secret())
    return path


@pytest.fixture(scope="module")
def cluster(model_dir: Path, secret: Path) -> Iterator[Cluster]:
    """One worker a pool, to begin with; every test leaves it so, whatever the worker's number."""
    with running_cluster(cluster_host="0.0.0.0", cluster_secret=str(secret), **SETTINGS) as cluster:
        yield cluster


class Load(Clients):
    """Clients that ask one request after the other while the block is entered; every answer is checked."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._served: list[Stream] = []
        super().__init__(self._ask, NUM_CLIENTS)

    def until_served_by_another(self, role: str, known: Collection[str]) -> None:
        """Until a worker that is none of these has served a request in that role."""
        wait_until(
            lambda: bool({getattr(each.timing, f"{role}_worker") for each in self._served} - {"", *known}),
            150.0,
            seen=lambda: f"none but {known} has served a request; {self.failures[:5]}",
        )

    def _ask(self, number: int) -> Requests:
        for turn in itertools.count():
            prompt = prompt_of(10_000 * number + turn, 200)
            stream = Stream(inference=self._cluster.inference, prompt=prompt, max_tokens=NUM_TOKENS, timeout_s=120.0)
            yield stream.served
            self._served.append(stream)


def pids(status: Status) -> dict[str, int]:
    return {worker["id"]: worker["pid"] for worker in status["workers"]}


def has(prefill: int, decode: int) -> Callable[[Status], bool]:
    """Both pools want and have so many, and nobody is leaving."""
    pools = {"prefill": prefill, "decode": decode}

    def whole(status: Status) -> bool:
        found = status["pools"]
        return len(status["workers"]) == prefill + decode and all(
            found[name]["desired"] == found[name]["ready"] == size for name, size in pools.items()
        )

    return whole


def serves(cluster: Cluster) -> None:
    prompt = prompt_of(77, 50)
    answer = cluster.generate(token_ids=prompt, sampling=sampling(10))
    assert answer.token_ids == expected_tokens(prompt, 10)


def baton(cluster: Cluster, *args: str) -> str:
    result = CliRunner().invoke(app, [*args, "--address", cluster.grpc])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def until_taken(order: Callable[[], None]) -> None:
    """As an operator would try again while nobody is there who takes orders."""

    def is_taken() -> bool:
        order()
        return True

    wait_until(is_taken, 150.0, every_s=0.2, not_yet=(NoController,))


@pytest.mark.parametrize("pool", [pytest.param("prefill", marks=pytest.mark.chaos), "decode"])
def test_a_pool_grows_and_shrinks_under_load_and_nobody_notices(cluster: Cluster, pool: str) -> None:
    status = cluster.client.status()
    before, roles = pids(status), {worker["role"]: worker["id"] for worker in status["workers"]}
    other = "decode" if pool == "prefill" else "prefill"
    with Load(cluster) as load:
        began_s = time.monotonic()
        cluster.client.scale(pool, 3)
        load.until_served_by_another(pool, before)
        first_s = time.monotonic() - began_s
        print(f"\n{pool} 1 -> 3: a new worker served its first request {first_s:.1f} s after the order")
        grown = pids(cluster.wait_for(has(**{pool: 3, other: 1})))
        assert grown.items() >= before.items(), "no other process was touched"
        assert grown.keys() - {roles[other]} == set(cluster.ids(pool))
        baton(cluster, "scale", pool, "1")
        shrunk = pids(cluster.wait_for(has(1, 1)))
    assert shrunk.items() <= grown.items(), "a worker was started again"
    assert shrunk[roles[other]] == before[roles[other]]
    assert load.num_served > NUM_CLIENTS


def test_nobody_but_the_controller_orders_a_worker_and_nobody_but_routers_the_controller(
    cluster: Cluster, secret: Path
) -> None:
    status = cluster.client.status()
    worker = status["workers"][0]
    info = leased(status["redis"]["address"], worker["content_id"], worker["id"])
    order = worker_pb2.DrainRequest(timeout_s=0.0)
    for member in (Principal.ROUTER, Principal.WORKER, Principal.OPERATOR):
        with control(info, KeyFile(secret, member)) as stub, pytest.raises(grpc.RpcError) as refused:
            stub.Drain(order)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    scale = admin_pb2.ScalePoolRequest(pool="decode", desired=2)
    for address in (info.address, status["controller"]["address"]):
        with grpc.insecure_channel(address) as channel:
            for call in (
                lambda: worker_pb2_grpc.WorkerControlStub(channel).Drain(order),
                lambda: admin_pb2_grpc.AdminStub(channel).ScalePool(scale),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert has(1, 1)(cluster.client.status())


def test_the_secret_changes_under_load(cluster: Cluster, secret: Path) -> None:
    """Two lines, of which the first signs; then the new one alone. All members speak to each other meanwhile."""
    old, new = secret.read_text(), draw_secret()
    with Load(cluster) as load:
        for text in (f"{new}\n{old}", new):
            write_private(secret, text)
            expected = load_keys(text, Principal.ROUTER, "").fingerprints
            wait_until(lambda: keys_of_routers(cluster).fingerprints == expected)  # noqa: B023 - at once
        before = cluster.ids("decode")
        until_taken(lambda: cluster.client.scale("decode", 2))
        load.until_served_by_another("decode", before)
        cluster.client.scale("decode", 1)
        cluster.wait_for(has(1, 1))
    assert load.num_served > NUM_CLIENTS
    assert "does not serve this router" not in cluster.log


def keys_of_routers(cluster: Cluster) -> KeyRing:
    """What the file of keys that the router has got holds now."""
    router = next(process for process in cluster.processes() if "router" in process.cmdline())
    config = Config.from_json(router.environ()["BATON_CONFIG_JSON"])
    return KeyFile(config.cluster.secret, Principal.ROUTER).keys


def test_a_drained_worker_is_replaced_before_it_goes(cluster: Cluster) -> None:
    (before,) = [worker for worker in cluster.client.status()["workers"] if worker["role"] == "decode"]
    with Load(cluster) as load:
        baton(cluster, "drain", before["id"], "--json")
        after = cluster.wait_for(has(1, 1))
    assert before["id"] not in pids(after)
    wait_until(lambda: not psutil.pid_exists(before["pid"]))  # it has left before its process ends
    assert load.num_served


def test_a_worker_changes_pools_with_its_cache(cluster: Cluster) -> None:
    baton(cluster, "scale", "decode", "2")
    before = cluster.wait_for(has(1, 2))
    worker = next(worker for worker in before["workers"] if worker["role"] == "decode")
    with Load(cluster):
        baton(cluster, "role", worker["id"], "prefill")
        flipped = cluster.wait_for(has(2, 1))
        time.sleep(1)  # a controller that did not know would repair the pools now
        assert pids(cluster.client.status()) == pids(flipped) == pids(before)
        baton(cluster, "role", worker["id"], "decode")
        assert pids(cluster.wait_for(has(1, 2))) == pids(before)
        baton(cluster, "scale", "decode", "1")
        cluster.wait_for(has(1, 1))


def test_orders_that_cannot_be_are_refused_with_a_sentence(cluster: Cluster) -> None:
    client = cluster.client
    (decode,) = [worker["id"] for worker in client.status()["workers"] if worker["role"] == "decode"]
    before = client.status()["pools"]
    orders: list[tuple[Callable[[], None], type[BatonError], str]] = [
        (lambda: client.scale("decoding", 2), InvalidRequest, "there are prefill, decode"),
        (lambda: client.scale("decode", 0), InvalidRequest, "at least 1 decode worker"),
        (lambda: client.scale("prefill", 1100), InvalidRequest, "at most 1024 workers"),
        (lambda: client.drain("worker-77"), InvalidRequest, rf"'worker-77'; there are .*{decode} \(decode\)"),
        (lambda: client.set_role("worker-77", "prefill"), InvalidRequest, "no worker is called"),
        (lambda: client.set_role(decode, "both"), InvalidRequest, "there are prefill, decode"),
        (lambda: client.set_role(decode, "prefill"), Conflict, "the last ready worker of the decode pool"),
    ]
    for order, kind, sentence in orders:
        with pytest.raises(kind, match=sentence):
            order()
    assert client.status()["pools"] == before
    client.set_role(decode, "decode")  # it has it: nothing to do


def test_only_this_machine_reaches_the_controller(cluster: Cluster) -> None:
    """It asks for no key: routers do, and they listen wherever the operator wants them to."""
    controller = cluster.client.status()["controller"]
    host, _, port = controller["address"].rpartition(":")
    sockets = psutil.Process(controller["pid"]).net_connections("inet")
    bound = {
        s.laddr.ip.removeprefix("::ffff:")
        for s in sockets
        if s.status == psutil.CONN_LISTEN and s.laddr.port == int(port)
    }
    assert {host} == bound == {"127.0.0.1"}


@pytest.mark.chaos
def test_workers_outlive_the_controller_and_so_do_orders(cluster: Cluster) -> None:
    cluster.client.scale("decode", 2)
    before = cluster.wait_for(has(1, 2))
    controller = before["controller"]["pid"]
    with Load(cluster):
        psutil.Process(controller).kill()
        until_taken(lambda: cluster.client.scale("prefill", 2))
        after = cluster.wait_for(has(2, 2))
    assert after["controller"]["pid"] != controller
    assert pids(after).items() >= pids(before).items(), "a worker was started again"
    psutil.Process(after["controller"]["pid"]).kill()
    time.sleep(0.3)
    victim = next(worker for worker in after["workers"] if worker["role"] == "prefill")
    psutil.Process(victim["pid"]).kill()  # while nobody looks
    cluster.wait_for(lambda s: has(2, 2)(s) and pids(s)[victim["id"]] != victim["pid"])
    for pool in ("prefill", "decode"):
        cluster.client.scale(pool, 1)
    cluster.wait_for(has(1, 1))


def controller_pid(status: dict[str, Any]) -> int:
    """0: none is known."""
    return int((status.get("controller") or {}).get("pid", 0))


def test_workers_serve_on_after_rays_death(cluster: Cluster) -> None:
    """The next controller adopts them; `tests.chaos.test_ray_faults` has streams run meanwhile."""
    status = cluster.client.status()
    (head,) = running(cluster.processes(), "deploy.ray_pools.head")
    children = head.children(recursive=True)
    head.kill()
    began_s = time.monotonic()
    psutil.wait_procs(children, timeout=30)
    serves(cluster)
    controller = status["controller"]["pid"]
    after = cluster.wait_for(lambda s: has(1, 1)(s) and controller_pid(s) not in (0, controller), 240)
    print(f"\npools whole {time.monotonic() - began_s:.1f} s after Ray's death")
    assert pids(after) == pids(status), "a worker was started again"
    until_taken(lambda: cluster.client.scale("decode", 1))


def test_a_client_is_told_when_nobody_takes_orders(cluster: Cluster) -> None:
    controller = psutil.Process(cluster.client.status()["controller"]["pid"])
    controller.kill()
    client = Client(cluster.grpc)
    try:
        with pytest.raises(NoController, match="try again"):
            client.scale("decode", 1)
        until_taken(lambda: client.scale("decode", 1))
    except BatonError as error:
        raise AssertionError(cluster.log) from error
    finally:
        client.close()
