"""A cluster in which everything is encrypted: who is admitted where, and a change of every certificate under load."""

from __future__ import annotations

import http.client
import itertools
import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.cluster import Role
from baton.config import ClusterConfig, RouterConfig, TransferConfig
from baton.tls import CertificateFiles, Tls
from baton.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from deploy.operator.client import opened
from engine.testing import expected_tokens
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import Answer, request
from tests.integration.test_operator_errors import baton
from tests.support.asking import prompt_of, sampling
from tests.support.certificates import Authority, cluster_settings, copy, serial_of
from tests.support.operator import OPERATOR_ENTRY, OPERATOR_KEY
from tests.support.waiting import wait_until

PATIENCE_S = 120.0
NUM_CLIENTS = 4
PROMPT_TOKENS, NUM_TOKENS = 64, 6


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def client_files(authority: Authority) -> CertificateFiles:
    return authority.sign("tenant", ["archive.example"])


@pytest.fixture(scope="module")
def fleet(authority: Authority, client_files: CertificateFiles) -> Iterator[Fleet]:
    tenants = authority.folder / "tenants.yaml"
    tenants.write_text(OPERATOR_ENTRY + 'archive: {certificates: ["DNS:archive.example"]}\n')
    members = ClusterConfig(**cluster_settings(authority.sign("member")))
    router = RouterConfig(mode="disaggregated", tenants_file=str(tenants), tls_client_certificates="required")
    with running_fleet(TransferConfig(transports=("tcp",)), router, cluster=members, step_ms=1.0) as fleet:
        fleet.fill(*Role)
        yield fleet


def _over_grpc(fleet: Fleet, tls: Tls, prompt: list[int]) -> Answer:
    """An answer over a connection of its own."""
    with opened(fleet.routers[0].grpc, tls) as link:
        message = request(token_ids=prompt, sampling=sampling(NUM_TOKENS))
        return Answer(list(inference_pb2_grpc.InferenceStub(link).Generate(message, timeout=PATIENCE_S)))


def _over_http(fleet: Fleet, tls: Tls, prompt: list[int]) -> tuple[str, int]:
    """The same: its text, and its number of tokens."""
    host, port = fleet.routers[0].http.split(":")
    link = http.client.HTTPSConnection(host, int(port), timeout=PATIENCE_S, context=tls.client_context())
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer: dict[str, Any] = json.loads(link.getresponse().read())
    link.close()
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def test_a_certificate_opens_both_endpoints_and_the_command_line(
    fleet: Fleet, authority: Authority, client_files: CertificateFiles
) -> None:
    tenant = Tls(client_files)
    prompt = prompt_of(1, PROMPT_TOKENS)
    answer = _over_grpc(fleet, tenant, prompt)
    assert answer.token_ids == expected_tokens(prompt, NUM_TOKENS)
    assert _over_http(fleet, tenant, prompt) == (answer.text, NUM_TOKENS)
    files = {"BATON_CERTIFICATE": client_files.certificate, "BATON_KEY": client_files.key, "BATON_CA": authority.path}
    files["BATON_API_KEY"] = OPERATOR_KEY
    status = baton("status", "--json", BATON_ADDRESS=fleet.routers[0].grpc, **files)
    assert len(json.loads(status.stdout)["workers"]) == 2, status.stderr
    plain = baton("status", BATON_ADDRESS=fleet.routers[0].grpc)
    assert plain.returncode == 1
    assert "TLS handshake failed" in plain.stderr
    assert len(plain.stderr.splitlines()) == 1, plain.stderr


def _first(calls: worker_pb2_grpc.WorkerCallsStub) -> object:
    return next(iter(calls.Serve(iter(()), timeout=5)))


def test_a_stranger_reaches_no_worker(fleet: Fleet, client_files: CertificateFiles, tmp_path: Path) -> None:
    strangers = {"plain": None, "without": Tls(CertificateFiles(certificate="", key="", authorities=()))}
    strangers["another's"] = Tls(Authority.make(tmp_path).sign("member"), name="baton")
    strangers["a tenant's"] = Tls(client_files, name="baton")
    for worker in fleet.client.status()["workers"]:
        for name, stranger in strangers.items():
            with opened(worker["address"], stranger) as link:
                control, calls = worker_pb2_grpc.WorkerControlStub(link), worker_pb2_grpc.WorkerCallsStub(link)
                orders: list[Callable[[], object]] = [
                    partial(control.Drain, worker_pb2.DrainRequest(), timeout=5),
                    partial(_first, calls),
                ]
                for call in orders:
                    with pytest.raises(grpc.RpcError) as caught:
                        call()
                    wanted = grpc.StatusCode.UNAUTHENTICATED if name == "a tenant's" else grpc.StatusCode.UNAVAILABLE
                    assert caught.value.code() is wanted, name


class _Load:
    """Clients that ask over a new connection each time, and what became of it."""

    def __init__(self, ask: Callable[[int], bool]) -> None:
        self._ask = ask
        self._seeds = itertools.count(1000)
        self._stopped = threading.Event()
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.outcomes["right" if self._ask(next(self._seeds)) else "wrong"] += 1
            except Exception as error:  # whatever a client may see
                self.outcomes[f"{type(error).__name__}: {error}"] += 1

    def some_more(self, number: int = 3 * NUM_CLIENTS) -> None:
        """Waits for so many answers."""
        until = self.outcomes.total() + number
        wait_until(lambda: self.outcomes.total() >= until, PATIENCE_S)

    def stop(self) -> None:
        self._stopped.set()


def test_every_certificate_and_their_authority_change_under_load(
    fleet: Fleet, authority: Authority, client_files: CertificateFiles
) -> None:
    """First the new authority is believed, too; then it signs every certificate; then the old one is believed no more.
    Meanwhile workers come and go, so that members connect anew."""
    tenant = Tls(client_files)

    def ask(seed: int) -> bool:
        prompt = prompt_of(seed, PROMPT_TOKENS)
        if seed % 2:
            return _over_http(fleet, tenant, prompt)[1] == NUM_TOKENS
        return _over_grpc(fleet, tenant, prompt).token_ids == expected_tokens(prompt, NUM_TOKENS)

    load = _Load(ask)
    before = serial_of(str(authority.folder / "member.crt"))
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        clients = [threads.submit(load.run) for _ in range(NUM_CLIENTS)]
        try:
            load.some_more()
            new = Authority.make(authority.folder, "new")
            both = authority.folder / "both.pem"
            both.write_text(Path(authority.path).read_text() + Path(new.path).read_text())
            copy(str(both), authority.path)
            load.some_more()
            for name, names in (("member", ["baton", "localhost", "127.0.0.1"]), ("tenant", ["archive.example"])):
                new.sign(name, names)
                load.some_more()
            copy(new.path, authority.path)
            load.some_more()
            for role in Role:
                (former, *_) = fleet.routers[0].ids(role)
                fleet.wait_for(fleet.add(role))
                fleet.remove(former, signal.SIGTERM)
                load.some_more()
        finally:
            load.stop()
        for client in clients:
            client.result()
    assert set(load.outcomes) == {"right"}, load.outcomes
    assert serial_of(str(authority.folder / "member.crt")) != before
