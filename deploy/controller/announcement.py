"""Announcement of the controller's model to the routers of its endpoint (docs/decisions/0020)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from baton.blocks import content_id
from baton.cluster import ModelAnnouncement, Role, RouterInfo, Worker, WorkerState
from baton.config import Config
from deploy.controller.state import StateFile
from deploy.scaling.window import of_model
from kvstore.leases import MODEL_LEASE_S, EndpointStore

REPEAT_S = MODEL_LEASE_S / 6
"""Time after which an unchanged announcement is written again. Routers verify each one that is written."""


class ModelAnnouncer:
    """Announcer of the model, as soon as the digest of its files is known: from a worker, or from an earlier process.

    Attributes:
        state: the state that is announced.
        problem: the reason why a wake-up makes no progress.
        is_leaving: see `ModelAnnouncement.is_leaving`.
    """

    def __init__(self, config: Config, endpoint: EndpointStore, state: StateFile) -> None:
        self.problem = ""
        self.is_leaving = False
        self._config = config
        self._endpoint = endpoint
        self.state = state
        self._content_id = content_id(config.kv_identity)
        self._announced: tuple[str, ModelAnnouncement | None] = ("", None)
        """Token of Redis and announcement that were written last."""
        self._announced_s = 0.0

    def learn(self, leases: Iterable[Worker]) -> bool:
        """Follow the digest that the workers report. Returns whether the announcement has changed.

        Raises:
            ConfigError: the state file cannot be written.
        """
        state = self.state.current
        if (files := chosen_files(state.files, leases)) == state.files:
            return False
        self.state.write(replace(state, files=files, created_s=state.created_s or int(time.time())))
        return True

    def announcement(self) -> ModelAnnouncement | None:
        """Return the announcement; None: the digest is unknown."""
        config, state = self._config, self.state.current
        if not state.files:
            return None
        return ModelAnnouncement(
            content_id=self._content_id,
            name=config.model.served_name or Path(config.model.path).name,
            path=config.model.path or config.model.id,
            release=config.release,
            share=config.model.share,
            files=state.files,
            max_model_len=config.engine.max_model_len,
            weights=config.model.weights,
            kv_dtype=config.engine_of(Role.DECODE).kv_dtype,
            mode=config.router.mode,
            created_s=state.created_s,
            is_asleep=state.sleep is not None,
            wake_s=state.wake_s,
            problem=self.problem,
            is_leaving=self.is_leaving,
        )

    async def announce(self, boot: str) -> None:
        """Announce the model if its files are known and something has changed, or REPEAT_S have passed.

        Args:
            boot: the token of Redis, which changes if Redis has lost its data.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        now_s, current = time.monotonic(), (boot, self.announcement())
        if current[1] is None or (current == self._announced and now_s - self._announced_s < REPEAT_S):
            return
        await self._endpoint.announce_model(current[1])
        self._announced, self._announced_s = current, now_s

    async def routers(self) -> tuple[RouterInfo, ...]:
        """Return the routers of the endpoint, with their counts of this model. Raises StoreUnavailable."""
        return tuple(of_model(router, self._content_id) for router in await self._endpoint.list_routers())


def chosen_files(announced: str, workers: Iterable[Worker]) -> str:
    """Return the digest of the files to announce: the one that most ready workers report.

    While workers are replaced because their settings have changed, some report another digest. If two digests have as
    many workers, the announced one stays, so that it changes once; otherwise the newest worker decides. Without a ready
    worker that reports a digest, the announced one stays.
    """
    ready = [worker.info for worker in workers if worker.load.state is WorkerState.READY and worker.info.files]
    num = Counter(info.files for info in ready)
    return (
        max(ready, key=lambda info: (num[info.files], info.files == announced, info.epoch)).files
        if ready
        else announced
    )
