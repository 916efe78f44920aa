"""Where a router gets a model's files from, and what it keeps of them on the disk that it shares with others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from baton.errors import Conflict, ModelLoadError, WorkerFailed
from baton.rpc.member_auth import MemberLink
from baton.rpc.model_files import FileSource, ModelFilesServicer
from baton.serving_files import ServingFiles
from router.models import files as module
from router.models.files import ModelFileCache
from tests.support.file_sources import FILES, INCARNATION, Hostile, Piece, serving

HELD = """
import fcntl, sys
with open(sys.argv[1]) as lock:
    fcntl.flock(lock, fcntl.LOCK_SH)
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def locked_elsewhere(lock: Path) -> Iterator[None]:
    """Another process holds the lock."""
    command = [sys.executable, "-c", HELD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        yield


class Provider:
    """A process with some sets: it counts who has asked."""

    def __init__(self, *sets: ServingFiles) -> None:
        self.sets = {each.digest: each for each in sets}
        self.num_asked = 0

    def read(self, digest: str) -> ServingFiles:
        self.num_asked += 1
        if digest not in self.sets:
            raise Conflict("not here")
        return self.sets[digest]

    @contextlib.asynccontextmanager
    async def source(self, name: str = "w") -> AsyncIterator[FileSource]:
        async with serving(ModelFilesServicer(self.read)) as address:
            yield FileSource(name, address, INCARNATION)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Callable[[], ModelFileCache]]:
    """Makes the caches of routers of one machine."""
    with contextlib.ExitStack() as stack:

        def start() -> ModelFileCache:
            made = ModelFileCache(tmp_path / "cache", MemberLink(None, None), source_s=5.0)
            stack.callback(made.close)
            return made

        yield start


def numbered(number: int, size: int = 1) -> ServingFiles:
    return ServingFiles({"config.json": number.to_bytes(4, "big") + bytes(size)})


def sets_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


async def test_a_set_is_read_once_and_found_again(
    router: Callable[[], ModelFileCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Provider(FILES)
    async with worker.source() as source:
        first = router()
        folder = await first.folder(FILES.digest, [source])
        assert folder == tmp_path / "cache" / FILES.digest
        assert ServingFiles.kept(folder).contents == FILES.contents
        assert await router().folder(FILES.digest, []) == folder, "another router of the machine needs no source"
        num_verified = 0
        kept = ServingFiles.is_kept

        def count(folder: Path, digest: str) -> bool:
            nonlocal num_verified
            num_verified += 1
            return kept(folder, digest)

        monkeypatch.setattr(ServingFiles, "is_kept", count)
        assert await first.folder(FILES.digest, []) == folder
        assert num_verified == 0, "once in a process is enough"
        first.release(FILES.digest)
        assert await first.folder(FILES.digest, []) == folder
        assert num_verified == 1
    assert worker.num_asked == 1


async def test_a_damaged_set_is_read_anew(router: Callable[[], ModelFileCache], tmp_path: Path) -> None:
    worker = Provider(FILES)
    async with worker.source() as source:
        first = router()
        folder = await first.folder(FILES.digest, [source])
        first.close()
        (folder / "config.json").write_text("{broken")
        assert await router().folder(FILES.digest, [source]) == folder
        assert ServingFiles.kept(folder).contents == FILES.contents
    assert worker.num_asked == 2


async def test_many_that_need_a_set_at_a_time_read_it_once(router: Callable[[], ModelFileCache]) -> None:
    worker, cache = Provider(FILES, numbered(1)), router()
    async with worker.source() as source:
        wanted = [FILES.digest, numbered(1).digest] * 5
        folders = await asyncio.gather(*(cache.folder(digest, [source]) for digest in wanted))
    assert len(set(folders)) == 2
    assert worker.num_asked == 2


async def test_routers_of_one_machine_do_one_another_no_harm(router: Callable[[], ModelFileCache]) -> None:
    worker = Provider(FILES)
    async with worker.source() as source:
        caches = [router() for _ in range(6)]
        folders = await asyncio.gather(*(cache.folder(FILES.digest, [source]) for cache in caches))
    assert len(set(folders)) == 1
    assert ServingFiles.kept(folders[0]).contents == FILES.contents
    assert {path.name for path in folders[0].parent.iterdir()} == {FILES.digest, f"{FILES.digest}.in-use"}


async def test_the_sources_are_asked_one_after_another_and_the_controller_last(
    router: Callable[[], ModelFileCache],
) -> None:
    empty, full, controller = [Provider() for _ in range(20)], Provider(FILES), Provider(FILES)
    async with contextlib.AsyncExitStack() as stack:
        sources = [await stack.enter_async_context(each.source()) for each in empty]
        last = await stack.enter_async_context(controller.source("the controller"))
        await router().folder(FILES.digest, [*sources, last])
        assert sum(each.num_asked for each in empty) == module.MAX_SOURCES - 1, "a few of many workers"
        assert controller.num_asked == 1
        other = await stack.enter_async_context(full.source())
        broken = await stack.enter_async_context(serving(Hostile(Piece(name="../x", piece=b"1"))))
        for _ in range(5):
            cache = ModelFileCache(Path("/proc/none"), MemberLink(None, None))
            await cache.folder(FILES.digest, [FileSource("bad", broken, INCARNATION), other, last])
            cache.close()
        assert (full.num_asked, controller.num_asked) == (5, 1)


async def test_without_a_source_that_has_it_the_last_ones_error_is_told(router: Callable[[], ModelFileCache]) -> None:
    worker = Provider()
    async with worker.source("worker-1") as first, serving(Hostile()) as hostile:
        bad = FileSource("the controller", hostile, INCARNATION)
        with pytest.raises(WorkerFailed, match="the controller sends other files than those announced"):
            await router().folder(FILES.digest, [first, bad])
        with pytest.raises(Conflict, match="not here"):
            await router().folder(FILES.digest, [bad, first])
    with pytest.raises(ModelLoadError, match="no worker and no controller provides the model's files"):
        await router().folder(FILES.digest, [])


@pytest.mark.parametrize("digest", ["", "..", "../" * 20 + "etc", "A" * 64, "a" * 63, "a" * 64 + "\n"])
async def test_what_is_no_digest_becomes_no_path(router: Callable[[], ModelFileCache], digest: str) -> None:
    async with Provider(FILES).source() as source:
        with pytest.raises(ModelLoadError, match="is no digest of a model's files"):
            await router().folder(digest, [source])


@pytest.mark.parametrize(("max_sets", "max_bytes"), [(3, 10**9), (100, 3 * 1004)])
async def test_the_sets_that_were_used_least_recently_go(
    router: Callable[[], ModelFileCache],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_sets: int,
    max_bytes: int,
) -> None:
    monkeypatch.setattr(module, "MAX_SETS", max_sets)
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", max_bytes)
    sets = [numbered(number, 1000) for number in range(6)]
    cache = router()
    async with Provider(*sets).source() as source:
        for number, each in enumerate(sets[:5]):
            await cache.folder(each.digest, [source])
            os.utime(tmp_path / "cache" / f"{each.digest}.in-use", (number, number))
        assert sets_in(tmp_path / "cache") == {each.digest for each in sets[:5]}, "all of them are in use"
        for each in sets[:5]:
            cache.release(each.digest)
        await cache.folder(sets[1].digest, [])  # it is now the latest
        cache.release(sets[1].digest)
        await cache.folder(sets[5].digest, [source])
    left = {sets[number].digest for number in (1, 4, 5)}
    assert sets_in(tmp_path / "cache") == left
    assert {path.name for path in (tmp_path / "cache").iterdir()} == left | {f"{each}.in-use" for each in left}


async def test_a_set_that_another_process_uses_stays(
    router: Callable[[], ModelFileCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SETS", 1)
    cache = router()
    async with Provider(*map(numbered, range(4))).source() as source:
        used = await cache.folder(numbered(0).digest, [source])
        lock = tmp_path / "cache" / f"{numbered(0).digest}.in-use"
        with locked_elsewhere(lock):
            cache.release(numbered(0).digest)
            for number in (1, 2):
                await cache.folder(numbered(number).digest, [source])
                cache.release(numbered(number).digest)
            assert sets_in(tmp_path / "cache") == {used.name, numbered(2).digest}
        await cache.folder(numbered(3).digest, [source])
        assert sets_in(tmp_path / "cache") == {numbered(3).digest}, "the other process has ended"


async def test_a_set_that_is_removed_at_this_moment_is_read_anew(
    router: Callable[[], ModelFileCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock file that a router has opened is removed before the router has locked it."""
    cache = router()
    lock, flock, removed = tmp_path / "cache" / f"{FILES.digest}.in-use", fcntl.flock, list[bool]()

    def late(file: BinaryIO, operation: int) -> None:
        if not removed and lock.exists():
            removed.append(True)
            lock.unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    async with Provider(FILES).source() as source:
        folder = await cache.folder(FILES.digest, [source])
    assert removed
    assert ServingFiles.kept(folder).digest == FILES.digest
    assert lock.exists(), "the set is locked by a file that others see"


async def test_a_set_that_is_taken_at_this_moment_is_not_removed(
    router: Callable[[], ModelFileCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another router has removed the set and written it again since its lock file was opened."""
    monkeypatch.setattr(module, "MAX_SETS", 1)
    cache, flock = router(), fcntl.flock
    path = tmp_path / "cache" / f"{FILES.digest}.in-use"
    with contextlib.ExitStack() as stack:

        def late(file: BinaryIO, operation: int) -> None:
            if operation & fcntl.LOCK_EX and file.name == str(path):
                path.unlink()
                flock(stack.enter_context(path.open("ab")), fcntl.LOCK_SH)
            flock(file, operation)

        async with Provider(FILES, numbered(1)).source() as source:
            folder = await cache.folder(FILES.digest, [source])
            cache.release(FILES.digest)
            os.utime(path, (1, 1))
            monkeypatch.setattr(fcntl, "flock", late)
            await cache.folder(numbered(1).digest, [source])
        assert ServingFiles.is_kept(folder, FILES.digest)
        assert path.exists()


async def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example because the disk is full."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    write, full = ServingFiles.write, [tmp_path / "cache"]

    def fail(self: ServingFiles, folder: Path) -> None:
        if folder.parent in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        write(self, folder)

    monkeypatch.setattr(ServingFiles, "write", fail)
    cache = ModelFileCache(tmp_path / "cache", MemberLink(None, None))
    async with Provider(FILES, numbered(1), numbered(2)).source() as source:
        folder = await cache.folder(FILES.digest, [source])
        assert (await cache.folder(numbered(1).digest, [source])).parent == folder.parent
        assert folder.is_relative_to(tmp_path / "tmp")
        assert ServingFiles.kept(folder).digest == FILES.digest
        assert await cache.folder(FILES.digest, []) == folder
        assert "No space left on device" in caplog.text
        full.append(folder.parent)
        with pytest.raises(ModelLoadError, match=r"cannot be written to .*cache or .*tmp: .*No space left on device"):
            await cache.folder(numbered(2).digest, [source])
    cache.close()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("obstacle", ["a file", "a link", "nothing may be made here"])
async def test_a_folder_that_is_not_ours_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    shared = tmp_path / "cache"
    match obstacle:
        case "a file":
            shared.write_text("")
        case "a link":
            (tmp_path / "theirs").mkdir()
            shared.symlink_to(tmp_path / "theirs")
        case _:
            shared = Path("/proc/baton")
    cache = ModelFileCache(shared, MemberLink(None, None))
    async with Provider(FILES).source() as source:
        folder = await cache.folder(FILES.digest, [source])
    assert folder.is_relative_to(tmp_path / "tmp")
    cache.close()


async def test_a_cancelled_call_leaves_a_set_that_the_next_one_finds(
    router: Callable[[], ModelFileCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, started = ServingFiles.write, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(self: ServingFiles, folder: Path) -> None:
        loop.call_soon_threadsafe(started.set)
        time.sleep(0.3)
        write(self, folder)

    monkeypatch.setattr(ServingFiles, "write", slow)
    worker, cache = Provider(FILES), router()
    async with worker.source() as source:
        asking = asyncio.create_task(cache.folder(FILES.digest, [source]))
        await started.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await cache.folder(FILES.digest, [source])
    assert worker.num_asked == 1


async def test_a_source_that_stalls_costs_its_time_and_no_more(tmp_path: Path) -> None:
    class Silent(Provider):
        def read(self, digest: str) -> ServingFiles:
            time.sleep(1.0)
            raise Conflict("too late")

    cache = ModelFileCache(tmp_path / "cache", MemberLink(None, None), source_s=0.2)
    async with Silent().source() as stalled, Provider(numbered(1)).source() as good:
        begin = time.monotonic()
        await cache.folder(numbered(1).digest, [stalled, good])
        assert time.monotonic() - begin < 1.0
    cache.close()
