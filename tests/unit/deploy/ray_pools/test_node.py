"""Node process of a Ray node: its output, its files for probes, and its workers. A shell script replaces Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.errors import WorkerFailed
from baton.rpc import RpcServer, channel
from deploy.ray_pools.node import IDLE_S, MAX_KEPT_BYTES, MAX_KEPT_IDS, MAX_KEPT_LINES, WorkersHere, end_in_words
from deploy.ray_pools.node_link import NodeLink, why_away
from deploy.ray_pools.supervisor import WorkerName
from tests.support.node_process import PATIENT_S, REPORT, SERVES, actor, is_alive, node, order, write
from tests.support.waiting import until, wait_until
from worker.log import NodeProcess, _kept, written


async def test_what_ray_and_workers_write_comes_out_as_log_lines(tmp_path: Path) -> None:
    """A line of Baton's own keeps its level and says of which worker it is; any other one becomes a log line."""
    said = [json.dumps({"level": "WARNING", "message": "slow"}), "Traceback (most", "  deeper"]
    with node(tmp_path) as here:
        async with actor(here, "decode-0") as link:
            code = f"import os; print({chr(10).join(said)!r}, flush=True); os.kill(os.getpid(), 9)"
            with pytest.raises(WorkerFailed, match="decode-0 ended before it was ready: deeper"):
                await link.start(order(code), "")
        lines = [json.loads(line) for line in here.end().splitlines()]
    assert ("INFO", "ray", "Ray is up") in [(line["level"], line.get("logger"), line["message"]) for line in lines]
    assert sorted((line["level"], line["message"]) for line in lines if line.get("worker") == "decode-0") == [
        ("ERROR", "decode-0 was killed by SIGKILL (by the kernel, out of memory?)"),
        ("INFO", "  deeper"),
        ("INFO", "Traceback (most"),
        ("INFO", "decode-0 starts"),
        ("WARNING", "slow"),
    ]


async def test_the_latest_lines_of_a_worker_can_be_asked_for(tmp_path: Path) -> None:
    """Those of an earlier process with its id come first: they are why it is a new one."""
    with node(tmp_path, "text") as here:
        asked = NodeProcess(here.socket)
        await write(here, "decode-0", "Fatal Python error: Aborted", json.dumps({"message": "m"}))
        await write(here, "prefill-0", "another's")
        await write(here, "decode-0", "it starts again")
        assert written(asked, "decode-0") == ["Fatal Python error: Aborted", '{"message": "m"}', "it starts again"]
        assert written(asked, "prefill-0") == ["another's"]
        assert written(asked, "decode-1") == []
        await write(here, "decode-0", *map(str, range(MAX_KEPT_LINES + 5)), "y" * 2 * MAX_KEPT_BYTES)
        lines = written(asked, "decode-0")
        assert len(_kept(asked, "decode-0").splitlines()) == MAX_KEPT_LINES
        assert (len(lines), lines[0], lines[-2]) == (MAX_KEPT_LINES, "6", str(MAX_KEPT_LINES + 4))
        for number in range(MAX_KEPT_IDS):
            await write(here, f"decode-{number + 2}", "one of many")
        assert written(asked, "decode-0") == [], "of so many, the one that wrote first is forgotten"
    with pytest.raises(WorkerFailed, match="the output of decode-0 cannot be read"):
        written(asked, "decode-0")


async def test_workers_of_two_clusters_share_a_node_and_an_id(tmp_path: Path) -> None:
    """Each model of a machine has a worker-0 of its own. Neither ends the other, and each has its own output."""
    with node(tmp_path, "text") as here:
        await write(here, "worker-0", "before")
        async with actor(here, "worker-0", "a", "big-1") as big, actor(here, "worker-0", "b", "small-2") as small:
            loud = f"print('of the big one', flush=True)\n{SERVES}"
            await big.start(order(loud), "one")
            await small.start(order(), "two")
            await here.wait_for("big-1/worker-0 starts: one; small-2/worker-0 starts: two")
            for link in (big, small):
                link.say("ready")
            await here.wait_for("big-1/worker-0 takes traffic; small-2/worker-0 takes traffic", "ready", "started")
            assert written(NodeProcess(here.socket, "a"), "worker-0") == ["of the big one"]
            assert written(NodeProcess(here.socket, "b"), "worker-0") == []
            small.send_signal(signal.SIGTERM)
            await small.ended()
            await here.wait_for("big-1/worker-0 takes traffic\n", "ready", "started")
            big.send_signal(signal.SIGTERM)
            await big.ended()
        out = here.end()
    assert re.search(r"^\[worker-0\] before$", out, re.MULTILINE), "as long as one cluster is here"
    assert re.search(r"^\[big-1/worker-0\] of the big one$", out, re.MULTILINE)
    assert re.search(r"^\[small-2/worker-0\] .* small-2/worker-0 has left", out, re.MULTILINE)


async def test_a_node_of_several_models_names_their_releases_from_the_start(tmp_path: Path) -> None:
    with node(tmp_path, "text", "", "--names-releases") as here:
        async with actor(here, "worker-0", "a", "big-1") as link:
            with pytest.raises(WorkerFailed):
                await link.start(order("print('alone')"), "")
        assert re.search(r"^\[big-1/worker-0\] alone$", here.end(), re.MULTILINE)


async def test_for_people_a_line_stays_as_it_is(tmp_path: Path) -> None:
    """Only the worker's id stands before it."""
    with node(tmp_path, "text") as here:
        await write(here, "prefill-1", "2026-11-27 20:00:00,000 INFO 7 x: ready", "y" * 100_000, "z")
        lines = here.end().splitlines()
    assert "Ray is up" in lines
    assert "[prefill-1] 2026-11-27 20:00:00,000 INFO 7 x: ready" in lines
    assert sum(line.count("y") for line in lines if line.startswith("[prefill-1] y")) == 100_000
    assert "[prefill-1] z" in lines


async def test_a_node_is_ready_while_every_worker_on_it_takes_traffic(tmp_path: Path) -> None:
    """The words say which one does not, and why. A worker that has lost its actor serves on."""
    with node(tmp_path) as here:
        await here.wait_for("no worker is here")
        async with actor(here, "decode-0") as one:
            assert await one.start(order(orphan_s=0.5), "it is a decode worker") == REPORT
            await here.wait_for("decode-0 starts: it is a decode worker")
            one.say("ready")
            await here.wait_for("decode-0 takes traffic", "ready", "started")
            async with actor(here, "prefill-0") as other:
                await other.start(order(), "")
                await here.wait_for("decode-0 takes traffic; prefill-0 starts", "started")
                other.say("ready")
                await here.wait_for("prefill-0 takes traffic", "ready", "started")
                one.say("away", "it takes no new work")
                await here.wait_for("decode-0 takes no traffic: it takes no new work; prefill-0", "started")
                one.say("ready")
                await here.wait_for("decode-0 takes traffic; prefill-0 takes traffic", "ready", "started")
                other.send_signal(signal.SIGTERM)
                assert (await other.ended()).status == 0
                await here.wait_for("decode-0 takes traffic", "ready", "started")
        await here.wait_for("no worker is here", "started")
        lines = [json.loads(line)["message"] for line in here.end().splitlines()]
    assert lines[-3:] == [
        "decode-0 has lost its Ray actor; it serves on for up to 0.5 s (cluster.orphan_timeout_s) until it is adopted",
        "decode-0 has had no Ray actor for 0.5 s: it drains and ends",
        "decode-0 has left",
    ]
    assert "prefill-0 has left" in lines


async def test_a_worker_is_adopted_by_its_next_actor(tmp_path: Path) -> None:
    """Which gets its report, orders its end and hears of it. The former actor's end changes nothing then."""
    with node(tmp_path) as here:
        async with actor(here, "decode-0") as first:
            await first.start(order(orphan_s=0.4), "")
        async with actor(here, "decode-0") as second, actor(here, "decode-0") as third:
            assert await second.adopt(()) == REPORT, "it was an orphan"
            assert await third.adopt(()) == REPORT
            await second.close()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(third.ended(), 1.0)
            third.send_signal(signal.SIGTERM)
            assert (await asyncio.wait_for(third.ended(), PATIENT_S)).status == 0
        async with actor(here, "decode-0") as fourth:
            with pytest.raises(WorkerFailed, match="decode-0 does not run on this node"):
                await fourth.adopt(())


async def test_an_actor_that_no_longer_owns_its_worker_cannot_end_it(tmp_path: Path) -> None:
    with node(tmp_path) as here:
        async with actor(here, "decode-0") as first, actor(here, "decode-0") as second:
            await first.start(order(), "")
            await second.adopt(())
            first.send_signal(signal.SIGKILL)
            second.send_signal(signal.SIGTERM)
            assert (await second.ended()).status == 0


async def test_a_worker_that_is_leaving_is_not_adopted(tmp_path: Path) -> None:
    slow = SERVES.replace("sys.exit(0)", "time.sleep(60)")
    with node(tmp_path) as here:
        async with actor(here, "decode-0") as first, actor(here, "decode-0") as second:
            await first.start(order(slow), "")
            first.send_signal(signal.SIGTERM)
            await until(lambda: "starts" in (here.folder / "workers").read_text())
            with pytest.raises(WorkerFailed, match="decode-0 is leaving"):
                await second.adopt(())


def test_a_node_removes_no_folder_but_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    (folder / "photos").mkdir(parents=True)
    command = [sys.executable, "-P", "-m", "deploy.ray_pools.node", "--folder", str(folder), "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "home is no folder of a node process: it has photos" in done.stderr
    (folder / "photos").rmdir()
    for name in ("workers", "socket"):
        (folder / name).touch()
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the file")
async def test_for_want_of_memory_the_kernel_kills_a_worker_first(tmp_path: Path) -> None:
    """Not the node process, with which all workers end."""
    shows = SERVES.replace("report =", "print(os.getpid(), flush=True)\nreport =")
    with node(tmp_path, "text") as here:
        async with actor(here, "decode-0") as link:
            await link.start(order(shows), "")
            await until(lambda: bool(written(NodeProcess(here.socket), "decode-0")), PATIENT_S)
            pid = int(written(NodeProcess(here.socket), "decode-0")[0])
            assert oom_score(pid) == 1000
            assert oom_score(here.process.pid) == oom_score(os.getpid())


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_a_node_that_cannot_write_its_files_goes_on(tmp_path: Path) -> None:
    """As on a full disk. It stays alive for the kubelet, which would end its workers, and takes orders."""
    with node(tmp_path) as here:
        shown = here.folder / "workers"
        shown.unlink()
        (shown / "it-is-no-file").mkdir(parents=True)
        async with actor(here, "decode-0") as link:
            await link.start(order(), "")
            link.say("ready")
            now_s = time.time()
            await until(lambda: (here.folder / "alive").stat().st_mtime > now_s + 1.0, PATIENT_S)
            link.send_signal(signal.SIGTERM)
            assert (await link.ended()).status == 0
        (shown / "it-is-no-file").rmdir()
        shown.rmdir()
        await until(lambda: shown.exists() and here.shows("no worker is here", "started"), PATIENT_S)


async def test_a_worker_that_loses_its_actor_before_it_is_ready_is_killed(tmp_path: Path) -> None:
    """Its controller starts it again, maybe elsewhere: the one of both that is ready last would fence the other."""
    loads = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    with node(tmp_path, "text") as here:
        async with actor(here, "decode-0") as link:
            starting = asyncio.create_task(link.start(order(loads), ""))
            await until(lambda: bool(written(NodeProcess(here.socket), "decode-0")), PATIENT_S)
            starting.cancel()
        pid = int(written(NodeProcess(here.socket), "decode-0")[0])
        await until(lambda: not is_alive(pid), PATIENT_S)
        assert "decode-0 has lost its Ray actor before it was ready: it is killed" in here.end()


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_worker_that_hangs_does_not_stay_without_an_actor(tmp_path: Path, is_told: bool) -> None:
    """Whether its actor is lost before it has got SIGTERM, or after."""
    hangs = SERVES.replace("sys.exit(0)", "print(os.getpid(), flush=True)")
    with node(tmp_path, "text") as here:
        async with actor(here, "decode-0") as link:
            await link.start(order(hangs, orphan_s=60.0 if is_told else 0.2, end_s=2.0), "")
            if is_told:
                link.send_signal(signal.SIGTERM)
                await until(lambda: bool(written(NodeProcess(here.socket), "decode-0")), PATIENT_S)
        pids = await until(
            lambda: [int(line) for line in written(NodeProcess(here.socket), "decode-0") if line.isdigit()], PATIENT_S
        )
        pid = pids[0]
        await until(lambda: not is_alive(pid), PATIENT_S)
        assert "decode-0 has not ended 2 s after SIGTERM: it is killed" in here.end()


async def test_a_start_replaces_a_process_that_was_given_up(tmp_path: Path) -> None:
    """The controller has decided that the former process is dead, though nothing could signal that process."""
    pids = []
    with node(tmp_path) as here:
        for _ in range(2):
            link = await NodeLink.open(str(here.socket), WorkerName("", "decode-0"))
            await link.start(order(), "")
            children = psutil.Process(here.process.pid).children()
            pids.append({each.pid for each in children if "-c" in each.cmdline() and "sh" not in each.cmdline()[0]})
            await link.close()
        (first,), (second,) = pids
        assert first != second
        assert not is_alive(first)
        assert is_alive(second)


async def test_a_start_that_is_impossible_is_an_error(tmp_path: Path) -> None:
    with node(tmp_path) as here:
        async with actor(here, "decode-0") as one:
            nothing = dataclasses.replace(order(), environment={"nul": "a\0b"})
            with pytest.raises(WorkerFailed, match="decode-0 cannot be started: embedded null byte"):
                await one.start(nothing, "")


async def test_gpus_of_workers_that_ray_has_forgotten_are_not_given_away(tmp_path: Path) -> None:
    """After a restart Ray assigns the second GPU to the worker that uses the first one, and the other way round."""
    shows = SERVES.replace("print(", "print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\nprint(")
    with node(tmp_path, "text") as here:
        async with actor(here, "decode-0") as zero, actor(here, "decode-1") as one:
            await zero.start(order(shows, gpus=["0"], share=1.0), "")
            await one.start(order(shows, gpus=["1"], share=1.0), "")
        async with actor(here, "decode-0") as zero, actor(here, "decode-1") as one, actor(here, "decode-2") as two:
            with pytest.raises(
                WorkerFailed, match="assigned to decode-2 are in use; this node runs decode-0, decode-1;"
            ):
                await two.start(order(shows, gpus=["0"], share=1.0), "")
            await zero.adopt(["1"])
            await one.adopt(["0"])
            zero.send_signal(signal.SIGTERM)
            await zero.ended()
        async with actor(here, "decode-0") as zero:
            await zero.start(order(shows, gpus=["1"], share=1.0), "")
            wait_until(
                lambda: [line for line in written(NodeProcess(here.socket), "decode-0") if line.isdigit()] == ["0", "0"]
            )
            assert written(NodeProcess(here.socket), "decode-1")[0] == "1"
            assert "decode-1 has lost its Ray actor" in written(NodeProcess(here.socket), "decode-1")[1]


async def test_ray_is_started_again_while_workers_run(tmp_path: Path) -> None:
    """The remaining processes of the old Ray are killed first. Without workers the node process ends with Ray."""
    starts, may_end = tmp_path / "starts", tmp_path / "may-end"
    script = f"sleep 600 & echo $! >> {starts}; while [ ! -e {may_end} ]; do sleep 0.05; done; rm {may_end}; exit 3"
    with node(tmp_path, "text", script) as here:
        async with actor(here, "decode-0") as link:
            await link.start(order(), "")
            here.let_ray_end()
            await until(lambda: len(starts.read_text().split()) == 2, PATIENT_S)
            first, second = map(int, starts.read_text().split())
            assert not is_alive(first), "it would keep its ports"
            link.send_signal(signal.SIGTERM)
            await link.ended()
        out = here.end()
    assert "Ray has ended with status 3, and these workers serve on: decode-0; starting Ray again in 2 s" in out
    assert not is_alive(second)


async def test_a_ray_whose_raylet_hangs_is_killed(tmp_path: Path) -> None:
    """The node process checks the raylet, because the kubelet would end the workers as well."""
    rpc = RpcServer(())
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    await rpc.set_serving(True)
    starts, may_end = tmp_path / "starts", tmp_path / "may-end"
    script = f"echo $$ >> {starts}; while [ ! -e {may_end} ]; do sleep 0.05; done"
    quick = "import deploy.ray_pools.raylet as raylet; raylet.CHECK_S = 0.05; "
    with node(tmp_path, "text", script, f"--raylet=127.0.0.1:{port}", before=quick) as here:
        async with actor(here, "decode-0") as link:
            await link.start(order(), "")
            await asyncio.sleep(1.0)
            assert is_alive(int(starts.read_text())), "it answers"
            await rpc.stop(0)
            await until(lambda: len(starts.read_text().split()) > 1, PATIENT_S)
            assert not is_alive(int(starts.read_text().split()[0]))


async def test_a_reader_that_stalls_does_not_stop_a_node(tmp_path: Path) -> None:
    """Only the output of workers waits for it, and their end is reported."""
    with node(tmp_path, "text") as here:
        async with actor(here, "decode-0") as link:
            await link.start(order(SERVES.replace("print(", "print('y' * 3_000_000)\nprint(", 1)), "")
            async with actor(here, "decode-1") as other:
                await other.start(order(), "")
                other.send_signal(signal.SIGTERM)
                assert (await asyncio.wait_for(other.ended(), PATIENT_S)).status == 0
        here.process.kill()


async def test_no_worker_outlives_its_node(tmp_path: Path) -> None:
    """The node process gets SIGTERM, or SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with node(tmp_path) as here:
            async with actor(here, "decode-0") as link:
                await link.start(order(), "")
                children = {each.pid for each in psutil.Process(here.process.pid).children()}
                here.process.send_signal(number)
                here.process.wait(PATIENT_S)
                if number == signal.SIGTERM:
                    assert (await link.ended()).status == -signal.SIGKILL
                else:
                    with pytest.raises(WorkerFailed, match="the node process has ended, and its workers with it"):
                        await link.ended()
            here.let_ray_end()
            wait_until(lambda: not any(map(is_alive, children)), PATIENT_S)  # noqa: B023
        (tmp_path / "may-end").unlink()


def test_a_node_without_a_worker_has_nothing_to_wait_for() -> None:
    """It counts as started after a while; a worker that begins before has its model covered."""
    here = WorkersHere(0.0)
    here.look(IDLE_S - 1)
    assert not here.is_started
    here.become(WorkerName("", "decode-0"), "starting", "")
    here.look(IDLE_S + 1)
    assert not here.is_started
    here.forget(WorkerName("", "decode-0"), IDLE_S + 1)
    here.look(IDLE_S + 2)
    assert not here.is_started
    here.look(2 * IDLE_S + 1)
    assert (here.is_started, here.is_ready) == (True, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_ray_s(tmp_path: Path, number: signal.Signals) -> None:
    """As a container's first process, it would otherwise have them ignored."""
    with node(tmp_path) as here:
        here.process.send_signal(number)
        assert here.process.wait(PATIENT_S) == 128 + number


def test_how_a_process_ended_in_words() -> None:
    """A signal has its name."""
    assert [end_in_words(status) for status in (0, 3, -signal.SIGSEGV, -99)] == [
        "",
        "ended with status 3",
        "crashed with SIGSEGV",
        "crashed with signal 99",
    ]


async def test_health_says_whether_a_worker_takes_new_work() -> None:
    """A worker that drains answers health checks, but takes no new work."""
    rpc = RpcServer(("baton.v1.WorkerCalls",))
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with channel(f"127.0.0.1:{port}") as link:
        await rpc.set_serving(True)
        assert await why_away(link) == ""
        await rpc.set_serving(False)
        assert await why_away(link) == "it takes no new work"
        await rpc.stop(0)
        assert await why_away(link) == "it does not answer (UNAVAILABLE)"
