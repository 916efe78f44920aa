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
"""Time after which the controller repeats an unchanged announcement: ten seconds. Routers verify every repetition, so
it should not be short."""


class ModelAnnouncer:
    """Announces the model, once the digest of its files is known from a worker or from the state file.

    Attributes:
        state: the state that is announced.
        problem: see `ModelAnnouncement.problem`.
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
        """Boot token of Redis at the latest announcement, and that announcement."""
        self._announced_s = 0.0

    def learn(self, leases: Iterable[Worker]) -> bool:
        """Record the digest that the workers report. Return whether it has changed.

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
        """Announce the model if its files are known, and the announcement has changed or is older than REPEAT_S.

        Args:
            boot: the boot token of Redis, which changes if Redis has lost its data.

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

    During a rollout of changed files, some workers report the old digest and others the new one. If two digests have
    equally many workers, the announced one stays, so that it changes only once; if it is neither of them, the newest
    worker decides. If no ready worker reports a digest, the announced one stays.
    """
    ready = [worker.info for worker in workers if worker.load.state is WorkerState.READY and worker.info.files]
    num = Counter(info.files for info in ready)
    return (
        max(ready, key=lambda info: (num[info.files], info.files == announced, info.epoch)).files
        if ready
        else announced
    )
