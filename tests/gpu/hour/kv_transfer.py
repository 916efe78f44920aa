"""Prefill in one process, decode in another, over each kind of transport; nothing of gRPC is needed for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from baton.messages import Ticket
from engine.core.engine import Engine
from engine.core.outputs import Generated, Reserved
from engine.core.runner import Fence, KVSpec
from engine.core.sequence import Purpose
from engine.model import transformers_model
from kvstore.transfer.copy.blocks import BlockCopier, RankCache
from kvstore.transfer.pipeline.receive_loop import ChunkWriter, ReceiveLoop
from kvstore.transfer.pipeline.send_loop import ChunkQueue, SendLoop
from kvstore.transfer.protocol.plan import TransferPlan, WireOptions, layout_of, plan
from kvstore.transfer.transport.streams import own_stream
from tests.gpu.hour.checks import FALLBACKS, Found, NotRun, is_rehearsal, judged
from tests.gpu.hour.ends import Side, require_kind, two
from tests.gpu.hour.models import answers, engine_of, make_folder, prompts_of, runner_of, spec_of, synchronize

EPOCH = 1
NUM_ROUNDS = 3
"""One to warm up, one as the prompt is computed, one of a prompt that is computed already."""
NUM_ANSWER = 8
NO_GRAPHS = "a sanitizer sees them once"
KV_OF_8B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 16}
KV_OF_8B |= {"num_key_value_heads": 8, "head_dim": 128}
"""As many bytes of KV a token as an 8B Llama, with an eighth of its weights."""


class Always:
    """The state machine of a transfer that stands: what the loops ask and report. Any thread may use it."""

    def __init__(self) -> None:
        self.num_done = 0
        self.first_s = 0.0
        self.last_s = 0.0
        self.error: Exception | None = None
        self.changed = threading.Condition()

    def ask(self, question: Callable[[Any], Any]) -> Any:
        return question(self)

    def apply_in_thread(self, event: Callable[[Any], Any]) -> None:
        event(self)

    def gather_begins(self, generation: int) -> bool:
        self.first_s = self.first_s or time.monotonic()
        return True

    def gather_ends(self, generation: int, now: float) -> list[Any]:
        return self._one_more()

    def scatter_begins(self, connection: int, generation: int, seq: int) -> bool:
        return True

    def scatter_ends(self, connection: int, generation: int) -> list[Any]:
        return self._one_more()

    def fail(self, transfer_id: str, generation: int, error: Exception) -> list[Any]:
        self.error = error
        return self._one_more()

    def until(self, number: int, timeout_s: float) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_done >= number or self.error, timeout_s), "chunks are missing"
        if self.error is not None:
            raise self.error

    def _one_more(self) -> list[Any]:
        with self.changed:
            self.num_done += 1
            self.last_s = time.monotonic()
            self.changed.notify_all()
        return []


class Setting:
    """What both sides agree on."""

    def __init__(self, spec: KVSpec, slot_bytes: int, num_tokens: int) -> None:
        self.layout = layout_of(spec)
        options = WireOptions(slot_bytes, 512, "auto")
        self.plan: TransferPlan = plan(
            self.layout, 0, self.layout, 0, num_tokens, (0,) * len(self.layout.groups), options
        )

    def ticket(self, number: int) -> Ticket:
        return Ticket(
            transfer_id=f"t{number}",
            generation=number + 1,
            decode_worker_id="decode",
            incarnation="1",
            kv_address="",
            num_tokens=self.plan.num_tokens,
            skip_tokens=0,
            wire_compat="",
            layout=self.layout,
        )


def in_thread(side: Side, job: Callable[[], Any], errors: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            with own_stream(side.device):
                job()
        except BaseException as error:
            traceback.print_exc()  # the other side's error alone says little
            errors.append(error)
            raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _prefill(
    engine: Engine, cache: RankCache, setting: Setting, prompt: list[int], number: int, loop: SendLoop
) -> tuple[int, float]:
    """Computes a prompt while its KV leaves. Returns the first token, and when the last layer was computed."""
    sequence = engine.add(spec_of(f"p{number}", prompt, NUM_ANSWER), Purpose.PREFILL, now=0.0)
    queue: ChunkQueue | None = None
    first_token = -1
    while (batch := engine.schedule(0.0)[0]).parts:
        if queue is None:
            copier = BlockCopier(cache, setting.plan, setting.layout, 0, sequence.block_ids)
            queue = ChunkQueue(setting.ticket(number), copier, True)
            if number < 2:
                loop.add(queue)
        ready, end = queue, batch.parts[0].end

        def layer_done(layer: int, fence: Fence | None, ready: ChunkQueue = ready, end: int = end) -> None:
            ready.advance(end, layer + 1, fence)

        for output in engine.commit(batch, engine.runner.execute(batch, layer_done), 0.0):
            if isinstance(output, Generated):
                first_token = output.token_ids[0]
    assert queue is not None
    synchronize()
    computed_s = time.monotonic()
    queue.finish()
    if number == 2:
        loop.add(queue)
    return first_token, computed_s


def _send(side: Side, kind: str, folder: str, num_tokens: int, slot_bytes: int) -> dict[str, Any]:
    engine = engine_of(runner_of(Path(folder), dtype=dtype(), num_blocks=blocks(num_tokens)), step_tokens=step_tokens())
    setting = Setting(engine.runner.spec, slot_bytes, num_tokens)
    machine = Always()
    cache = seen_by(side, engine.runner.caches[0])
    loop = SendLoop(EPOCH, machine, 2.0)  # type: ignore[arg-type]
    errors: list[BaseException] = []
    opened: list[Any] = []

    def run() -> None:
        opened.append(side.open(kind, slot_bytes=slot_bytes, op_timeout_s=20.0))
        loop.run(opened[0])

    thread = in_thread(side, run, errors)
    times = []
    for number, prompt in enumerate(prompts_of([num_tokens] * NUM_ROUNDS)):
        machine.first_s = 0.0
        side.meet(f"round-{number}")
        first_token, computed_s = _prefill(engine, cache, setting, prompt, number, loop)
        machine.until((number + 1) * len(setting.plan.chunks), 60.0)
        side.put(f"round/token-{number}", str(first_token).encode())
        times.append((machine.first_s, computed_s))
        side.meet(f"end-{number}")
    prompts = prompts_of([num_tokens] * NUM_ROUNDS)
    whole = [answers(engine, [prompt], NUM_ANSWER)[0].tokens for prompt in prompts]  # one by one, as at the receiver
    loop.stop()
    thread.join(5)
    opened[0].close()
    assert not errors, errors
    return {"times": times, "answers": whole, "num_bytes": setting.plan.num_bytes}


def _receive(side: Side, kind: str, folder: str, num_tokens: int, slot_bytes: int) -> dict[str, Any]:
    engine = engine_of(runner_of(Path(folder), dtype=dtype(), num_blocks=blocks(num_tokens)))
    setting = Setting(engine.runner.spec, slot_bytes, num_tokens)
    machine = Always()
    writers: dict[int, ChunkWriter] = {}
    loop = ReceiveLoop(EPOCH, writers, slot_bytes, 10.0)
    errors: list[BaseException] = []
    in_thread(side, lambda: loop.run(side.open(kind, slot_bytes=slot_bytes, op_timeout_s=20.0)), errors)
    times, found = [], []
    cache = seen_by(side, engine.runner.caches[0])
    for number, prompt in enumerate(prompts_of([num_tokens] * NUM_ROUNDS)):
        sequence = engine.add(spec_of(f"d{number}", prompt, NUM_ANSWER), Purpose.RECEIVE, now=0.0)
        (reserved,) = (output for output in engine.schedule(0.0)[1] if isinstance(output, Reserved))
        copier = BlockCopier(cache, setting.plan, setting.layout, 0, reserved.block_ids)
        ticket = setting.ticket(number)
        writers[ticket.generation] = ChunkWriter(ticket, 1, copier, machine, True)  # type: ignore[arg-type]
        side.meet(f"round-{number}")
        machine.until((number + 1) * len(setting.plan.chunks), 60.0)
        times.append(machine.last_s)
        token = int(side.get(f"round/token-{number}"))
        tokens = [token]
        engine.insert(sequence, token, 0.0)
        while (batch := engine.schedule(0.0)[0]).parts:
            for output in engine.commit(batch, engine.runner.execute(batch), 0.0):
                assert isinstance(output, Generated)
                tokens.extend(output.token_ids)
        found.append(tokens)
        side.meet(f"end-{number}")
    loop.stop()
    return {"times": times, "answers": found, "errors": [str(error) for error in errors]}


def _both(kind: str, folder: str, num_tokens: int, slot_bytes: int, side: Side) -> dict[str, Any]:
    side.rehearse_on_cpu(kind)
    if "TORCH_CUDA_SANITIZER" in os.environ:  # it sees what a graph launches once, while that is captured
        FALLBACKS.wanted.add(NO_GRAPHS)
        vars(transformers_model)["decode_graphs"] = lambda *_: NO_GRAPHS
    return (_send if side.sends else _receive)(side, kind, folder, num_tokens, slot_bytes)


def seen_by(side: Side, cache: RankCache) -> RankCache:
    """Returns a cache. In a rehearsal it says that it is on the GPU that is none, where the slots are."""
    if not is_rehearsal():
        return cache
    names = ("spec", "groups", "states", "table_sizes")
    there = SimpleNamespace(device=side.device, **{name: getattr(cache, name) for name in names})
    return cast("RankCache", there)


def dtype() -> str:
    return "float32" if is_rehearsal() else "bfloat16"


def blocks(num_tokens: int) -> int:
    return 4 * (num_tokens + NUM_ANSWER) // 16 + 16


def step_tokens() -> int:
    return 64 if is_rehearsal() else 1024


def measure(kind: str, slot_bytes: int, num_tokens: int, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Hands three prompts over, and compares the answers with those of one process."""
    require_kind(kind)
    folder = make_folder(fields, dtype=dtype())
    try:
        sent, received = two(partial(_both, kind, str(folder), num_tokens, slot_bytes), timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    (_, computed_s), arrived_s = sent["times"][1], received["times"][1]
    streamed_s = arrived_s - sent["times"][1][0]
    bulk_s = received["times"][2] - sent["times"][2][0]
    return {
        "same_tokens": sent["answers"] == received["answers"],
        "mib": sent["num_bytes"] >> 20,
        "bulk_gb_s": round(sent["num_bytes"] / bulk_s / 1e9, 2),
        "streamed_s": round(streamed_s, 4),
        "tail_s": round(max(0.0, arrived_s - computed_s), 4),
        "tail_share": round(max(0.0, arrived_s - computed_s) / streamed_s, 3),
        "slot_mib": slot_bytes / 2**20,
    }


def whole(kind: str) -> Found:
    """A whole KV transfer between two processes on one GPU: tokens, the tail behind the last layer, and the rate."""
    slot_bytes, num_tokens = (2**16, 300) if is_rehearsal() else (32 * 2**20, 4096)
    found = measure(kind, slot_bytes, num_tokens, {} if is_rehearsal() else KV_OF_8B, 110.0)
    is_right = found["same_tokens"]
    if kind == "ipc" and not is_rehearsal():
        is_right &= found["tail_share"] <= 0.15
    return judged(is_right, "other tokens than in one process, or too long a tail", **found)


def refused() -> Found:
    """NCCL itself refuses two ranks on one GPU of one host; Baton does not try it there."""
    environment = {"NCCL_HOSTID": "the same"}
    try:
        two(_opens, 50.0, environment)
    except AssertionError as error:
        return judged(True, error=str(error)[:300])
    return judged(True, error="none: this NCCL takes two ranks on one GPU")


def _opens(side: Side) -> None:
    with own_stream(side.device):
        side.open("nccl", nccl_open_timeout_s=20.0).close()


def sanitizer(tool: str) -> Found:
    """A small KV transfer over tcp under a tool that finds races or bad accesses of the device."""
    environment = dict(os.environ)
    command = [sys.executable, "-m", "tests.gpu.first_hour", "--check", "kv_transfer-small"]
    if tool == "torch":
        environment["TORCH_CUDA_SANITIZER"] = "1"
    else:
        if (path := shutil.which("compute-sanitizer")) is None:
            raise NotRun("compute-sanitizer is not installed")
        command = [path, "--tool", "memcheck", "--target-processes", "all", *command]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=140)
    said = done.stdout + done.stderr
    lines = said.splitlines()
    complaints = [line for line in lines if "data race" in line.lower() or "Invalid" in line]
    first = lines.index(complaints[0]) if complaints else 0
    is_right = '"status": "pass"' in said and not complaints
    return judged(
        is_right,
        "it complains, or the KV transfer failed under it",
        complaints=complaints[:5],
        first=lines[first : first + 40],
        end=said[-600:],
    )


def small(kind: str) -> Found:
    """A KV transfer of a small model, for tools that are slow."""
    found = measure(kind, 2**18, 300, {}, 120.0)
    return judged(found["same_tokens"], "other tokens than in one process", **found)
