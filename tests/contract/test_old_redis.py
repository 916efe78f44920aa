"""Redis comes back old, not empty: from a dump that knows neither who came since nor what changed since."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.cluster import WorkerLoad
from baton.errors import Fenced
from deploy.embedded_redis import EmbeddedRedis
from kvstore.index import Mirror, MirrorFollower
from kvstore.index.keys import Keys
from kvstore.leases import LeaseKeeper
from tests.contract.conftest import RedisServer
from tests.contract.test_index import FakeWorker, keys, owns, running, stored
from tests.contract.test_leases import LOAD, worker_info
from tests.support.waiting import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator

    from tests.contract.conftest import Backend


class RedisWithAPast(EmbeddedRedis):
    """Starts with what was last kept."""

    kept: Path | None = None

    def keep(self, file: Path) -> None:
        """To be called after the server's own SAVE."""
        assert self._folder
        self.kept = Path(shutil.copy(self._folder / "dump.rdb", file))

    def _spawn(self, binary: Path, folder: Path) -> subprocess.Popen[bytes]:
        if self.kept:
            shutil.copy(self.kept, folder / "dump.rdb")
        return super()._spawn(binary, folder)


@pytest.fixture
async def old_server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    with RedisWithAPast(socket_path=tmp_path / "redis.sock") as embedded:
        server = RedisServer(embedded)
        yield server
        await server.disconnect()


async def keep(server: RedisServer, backend: Backend, file: Path) -> None:
    assert isinstance(server.embedded, RedisWithAPast)
    assert backend.connection
    assert await backend.connection.call("SAVE")
    server.embedded.keep(file)


async def test_after_the_return_of_an_old_redis_every_mirror_is_right_again(
    old_server: RedisServer, namespace: str, tmp_path: Path
) -> None:
    """Epochs, sequence numbers and ids of the stream are lower than the mirror has seen, and the boot is the same."""
    backend, router = old_server.backend(namespace), old_server.backend(namespace)
    late = MirrorFollower(router.index, Mirror(), poll_s=0.05, lease_s=0.5)
    keepers = {name: LeaseKeeper(backend.leases, name, renew_s=0.05) for name in ("stays", "again", "new")}
    stays = FakeWorker(backend, "stays", await keepers["stays"].acquire())
    past = FakeWorker(backend, "again", await backend.leases.acquire("again"))
    async with asyncio.TaskGroup() as tasks, running(stays.publisher, late):

        def hold(worker: FakeWorker) -> asyncio.Task[None]:
            info = worker_info(worker.worker_id, worker.epoch)
            return tasks.create_task(keepers[worker.worker_id].run(lambda: (info, WorkerLoad())))

        keeping = [hold(stays)]
        async with running(past.publisher):
            assert await backend.leases.renew(worker_info("again", past.epoch), LOAD)
            past.store(7, 8)
            stays.store(1, 2, 3)
            await until(lambda: owns(late.mirror, stays) and owns(late.mirror, past))
        boot = (await backend.index.state()).boot
        await keep(old_server, backend, tmp_path / "kept.rdb")

        backend.clock.now += 10.0
        again, new = [FakeWorker(backend, name, await keepers[name].acquire()) for name in ("again", "new")]
        async with running(again.publisher, new.publisher):
            keeping += [hold(again), hold(new)]
            for number in range(20):  # one event each
                stays.store(100 + number)
                await until(lambda: stays.publisher.is_settled)
            stays.remove(1, 2)
            again.store(9)
            new.store(1)
            workers = (stays, again, new)
            await until(lambda: all(owns(late.mirror, worker) for worker in workers))
            seen = {worker.worker_id: late.mirror.position(worker.worker_id) for worker in workers}

            old_server.embedded.kill()
            await until(lambda: not late.connected)
            stays.store(200)
            again.remove(9)
            old_server.embedded.start()
            await until(lambda: late.connected and late.lag_s == 0)
            # A mirror may still own what it knew before: the store has it once its worker has told all again.
            publishers = [worker.publisher for worker in workers]
            await until(lambda: all(one.num_snapshots == 2 and one.is_settled for one in publishers))
            await until(lambda: all(owns(late.mirror, worker) for worker in workers))
            assert (await backend.index.state()).boot == boot
            for worker in workers:
                position, before = late.mirror.position(worker.worker_id), seen[worker.worker_id]
                assert position
                assert before
                assert position.epoch == before.epoch == worker.epoch
                assert (await backend.index.snapshot(worker.worker_id, worker.epoch))[1] == worker.owned
            assert late.mirror.lookup(keys(7, 8)) == {}, "of the incarnation that the dump knows"
            with pytest.raises(Fenced):
                await backend.leases.renew(worker_info("again", past.epoch), LOAD)
            with pytest.raises(Fenced):
                await backend.index.apply(stored(past.epoch, 3, 99, worker_id="again"))
            for number in (300, 301, 302):
                stays.store(number)
                await until(lambda: owns(late.mirror, stays))
            for task in keeping:
                task.cancel()
    assert {worker.publisher.num_snapshots for worker in (stays, again, new)} == {2}, "each told all once more"


async def test_who_died_since_the_dump_is_gone_when_its_lease_ends(
    old_server: RedisServer, namespace: str, tmp_path: Path
) -> None:
    """The dump has its lease, with the time at which that ends; nothing of it comes back to stay."""
    backend = old_server.backend(namespace)
    late = MirrorFollower(old_server.backend(namespace).index, Mirror(), poll_s=0.02, blocks_ttl_s=0.1)
    gone = FakeWorker(backend, "gone", await backend.leases.acquire("gone"))
    async with running(late):
        async with running(gone.publisher):
            assert await backend.leases.renew(worker_info("gone", gone.epoch), LOAD)
            gone.store(1, 2)
            await until(lambda: owns(late.mirror, gone))
        assert backend.connection
        assert await backend.connection.call("PEXPIRE", Keys(namespace).lease("gone"), 1500)
        await keep(old_server, backend, tmp_path / "kept.rdb")
        await backend.leases.release("gone", gone.epoch)
        await until(lambda: late.mirror.workers() == {})
        old_server.embedded.kill()
        await until(lambda: not late.connected)
        old_server.embedded.start()
        await until(lambda: late.connected)
        await until(lambda: late.mirror.workers() == {} and len(late.mirror) == 0)
        assert await backend.leases.list_workers() == []
        assert late.mirror.lookup(keys(1, 2)) == {}
        successor = await backend.leases.acquire("gone")
        assert successor > gone.epoch, "the store remembers the highest epoch for longer than the lease"
