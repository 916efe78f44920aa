"""What a router's start has needed is given back before it serves anybody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton import garbage
from baton.config import Config
from baton.telemetry import logs
from router import process, server


async def test_what_is_loaded_is_kept_and_the_rest_given_back_before_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[str] = []

    class Router:
        async def run(self, stop: asyncio.Event) -> None:
            steps.append("serves")

    def build(config: Config) -> Any:
        steps.append("loads")
        return Router()

    monkeypatch.setattr(server, "build", build)
    monkeypatch.setattr(garbage, "keep_what_is_loaded", lambda: steps.append("gives back"))
    await server.serve(Config(), asyncio.Event())
    assert steps == ["loads", "gives back", "serves"]


def test_its_threads_share_a_heap_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    async def serve(config: Config, stop: asyncio.Event) -> None:
        steps.append("serves")

    monkeypatch.setattr(garbage, "share_heap", lambda: steps.append("shares"))
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr("baton.config.process_config", Config)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(process, "serve", serve)
    process.main()
    assert steps == ["shares", "serves"]
