"""Garbage in Redis under real processes and load: none of them ends, and no request is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import redis

from baton.cluster import Role, Worker
from baton.config import RouterConfig, TransferConfig
from kvstore.index.keys import Keys, endpoint_namespace
from kvstore.leases.codec import decode_info, decode_load, encode
from tests.chaos.fleet import Fleet, running_fleet
from tests.contract.garbage import at_endpoint, index_of, leases_of, shared
from tests.support.asking import prompt_of
from tests.support.load import Clients, Requests, Stream
from tests.support.waiting import wait_until

NUM_CLIENTS = 3
BETWEEN_S = 0.03


@contextlib.contextmanager
def asking(fleet: Fleet) -> Iterator[None]:
    """Clients that check every token, while the block is entered; a request that fails fails it."""

    def script(client: int) -> Requests:
        for turn in itertools.count():
            yield Stream(inference=fleet.inference, prompt=prompt_of(1000 * client + turn, 50), max_tokens=20).served

    with Clients(script, NUM_CLIENTS) as clients:
        yield
        wait_until(lambda: clients.num_served > 50, 60.0, seen=lambda: f"{clients.num_served} requests were served")


def test_garbage_ends_no_process_and_refuses_no_request() -> None:
    """Regression: most of these ended every router, some a worker, one made every request too long."""
    with running_fleet(TransferConfig(), RouterConfig(mode="disaggregated")) as fleet:
        router = fleet.fill(*Role)
        store: Any = redis.Redis.from_url(fleet.config.index.redis_url, socket_timeout=60, socket_connect_timeout=60)
        (ids,) = store.keys("kv:{*}:workers")
        keys = Keys(ids.decode().partition("{")[2].partition("}")[0])
        of_all = Keys(endpoint_namespace(fleet.config.cluster.endpoint))

        def lease(worker_id: str) -> Worker:
            info, load = store.hmget(keys.lease(worker_id), "info", "load")
            return Worker(decode_info(info), decode_load(load))

        one, other = (lease(worker_id) for role in Role for worker_id in router.ids(role))
        short = Worker(dataclasses.replace(one.info, id="short", max_model_len=64), one.load)
        with asking(fleet):
            described = {"epoch": short.info.epoch, "info": encode(short.info), "load": encode(short.load)}
            store.hset(keys.lease("short"), mapping=described)
            store.sadd(keys.workers, "short")
            for garbage in (*leases_of(keys, one), *shared(keys), *at_endpoint(of_all), *index_of(keys, other)):
                for command in garbage.commands:
                    with contextlib.suppress(redis.ResponseError):  # what is there already is of another type
                        store.execute_command(*command)
                time.sleep(BETWEEN_S)
                assert router.process.poll() is None, f"the router has ended by a {garbage}: {router.log}"
            # Nobody writes these anew before the router has seen them, once it has fixed the lists of their names.
            wait_until(lambda: store.type(keys.workers) == store.type(of_all.routers) == b"set")
            store.hset(keys.lease("ghost"), mapping={"epoch": "x", "info": "x", "load": "x"})
            store.sadd(keys.workers, "ghost")
            store.set(of_all.router("ghost"), "x")
            store.sadd(of_all.routers, "ghost")
        assert all(process.is_alive() for process in fleet.workers.values())
        router.wait_for(lambda s: s["redis"]["ok"] and {w["id"] for w in s["workers"]} >= {one.info.id, other.info.id})
        router.wait_for(lambda s: {each["what"] for each in s["redis"]["garbage"]} >= {"lease", "event", "router"})
        counted = {name: value for name, value in router.metrics() if name.startswith("baton_store_garbage_total")}
        assert counted['baton_store_garbage_total{what="lease"}'] > 0
