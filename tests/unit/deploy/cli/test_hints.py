"""What a user is shown to type next works as it stands."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import ClusterConfig, Config, RouterConfig
from deploy.cli.hints import local_address, page_url, try_command


@pytest.fixture(autouse=True)
def on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "baton").write_text("#!/bin/sh\n")
    (tmp_path / "baton").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_the_command_names_what_differs_from_what_it_would_do_anyway() -> None:
    assert try_command(Config()) == "baton generate Hello"
    other = Config(cluster=ClusterConfig(grpc_port=50251, http_port=8201, host="0.0.0.0"))
    assert local_address(other) == "127.0.0.1:50251"
    assert page_url(other) == "http://127.0.0.1:8201/"
    assert try_command(other) == "baton generate Hello --address 127.0.0.1:50251"
    assert try_command(Config(), api_key="secret") == "baton generate Hello --api-key KEY"
    assert try_command(Config(router=RouterConfig(tenants_file="/t.yaml"))) == "baton generate Hello --api-key KEY"


def test_with_certificates_the_command_shows_and_believes_them() -> None:
    members = ClusterConfig(tls_certificate="/m.pem", tls_key="/m.key", tls_ca="/ca.pem")
    config = Config(cluster=members)
    assert page_url(config).startswith("https://")
    assert try_command(config) == "baton generate Hello --ca /ca.pem"
    own = replace(config, router=RouterConfig(tls_certificate="/r.pem", tls_key="/r.key"))
    assert try_command(own) == "baton generate Hello --ca /r.pem"
    asking = replace(config, router=RouterConfig(tls_client_certificates="required"))
    assert try_command(asking) == "baton generate Hello --ca /ca.pem --certificate /m.pem --key /m.key"


def test_a_program_that_is_not_on_the_path_is_named_by_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    assert try_command(Config()) == f"{programs / 'python'} -P -m deploy.cli generate Hello"
    (programs / "baton").write_text("")
    assert try_command(Config()) == f"{programs / 'baton'} generate Hello"
    monkeypatch.chdir(tmp_path)
    assert try_command(Config()) == ".venv/bin/baton generate Hello"
