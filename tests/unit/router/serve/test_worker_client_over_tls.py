"""Calls to workers over TLS, whose certificates change."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.context import Context

from baton.config import ClusterConfig
from baton.tls import member_tls
from router.serve.worker_client import WorkerCallError, WorkerClient
from tests.support.certificates import Authority, cluster_settings
from tests.support.waiting import until
from tests.unit.router.serve.test_worker_client import Engine, serving, spec, tokens_of, worker_at


async def test_a_connection_that_is_opened_again_takes_the_new_certificates(tmp_path: Path) -> None:
    tls = member_tls(ClusterConfig(**cluster_settings(Authority.make(tmp_path).sign("member"))))
    calls, port = WorkerClient(tls=tls), 0
    for name in ("1", "2"):
        engine = Engine()
        async with serving(engine, port, tls) as (_, port):
            engine.say(name, tokens_of(name, 0))
            async with calls.decode(worker_at(port), spec(name), await_kv=False, trace=Context()) as stream:
                assert await stream.read() == tokens_of(name, 0)
                Authority.make(tmp_path).sign("member")
        await until(lambda: all(link.is_broken for link in calls._links.values()), 30.0)  # before, calls go over it
    await calls.close()


async def test_a_router_without_a_certificate_is_no_member(tmp_path: Path) -> None:
    tls = member_tls(ClusterConfig(**cluster_settings(Authority.make(tmp_path).sign("member"))))
    calls = WorkerClient()
    async with serving(Engine(), 0, tls) as (_, port):
        with pytest.raises(WorkerCallError):
            await calls.decode(worker_at(port), spec("1"), await_kv=False, trace=Context()).read()
        await calls.close()
