"""Slot 5: the machine's rates, a transport's by slot size, and an 8B Llama of random weights against both."""

from __future__ import annotations

import heapq
import importlib.util
import shutil
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from baton.engine.core.sequence import Purpose
from kvstore.transfer.transport.streams import own_stream
from tests.gpu.hour.checks import Found, NotRun, is_rehearsal, judged
from tests.gpu.hour.ends import Side, header_of, require_kind, taken, two
from tests.gpu.hour.models import (
    LLAMA_8B,
    SMALL,
    device_name,
    engine_of,
    make_folder,
    prompts_of,
    runner_of,
    spec_of,
    synchronize,
)

MODEL = Path(tempfile.gettempdir()) / "baton-first-hour-8b"
NUM_WARM, NUM_STEPS = 4, 24
STEP_TOKENS = 2048
ATTENTION = ("attend", "combine", "flash", "fmha", "attention", "cutlassF")
"""Parts of the names of kernels that attend."""
MARK = "spin_kernel"
"""The kernel that `torch.cuda._sleep` launches."""


def _median_s(job: Any, times: int = 10) -> float:
    job()
    synchronize()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        job()
        synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def bandwidth() -> float:
    """Bytes a second that the device reads and writes in a large copy."""
    size = 2**24 if is_rehearsal() else 2**31
    source, target = (torch.empty(size, dtype=torch.uint8, device=device_name()) for _ in range(2))
    return 2 * size / _median_s(lambda: target.copy_(source))


def matmul_rate() -> float:
    """Operations a second of a large product in bfloat16."""
    size = 256 if is_rehearsal() else 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device_name()) for _ in range(2))
    return float(2 * size**3 / _median_s(lambda: a @ b))


def rates() -> Found:
    """What the machine can: copies on the device and to main memory, and a product."""
    size = 2**20 if is_rehearsal() else 2**30
    device = torch.empty(size, dtype=torch.uint8, device=device_name())
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=not is_rehearsal())
    figures = {
        "copy_gb_s": round(bandwidth() / 1e9),
        "to_pinned_gb_s": round(size / _median_s(lambda: pinned.copy_(device, non_blocking=True)) / 1e9, 1),
        "from_pinned_gb_s": round(size / _median_s(lambda: device.copy_(pinned, non_blocking=True)) / 1e9, 1),
        "matmul_tflop_s": round(matmul_rate() / 1e12, 2),
    }
    is_right = is_rehearsal() or (figures["copy_gb_s"] > 1000 and figures["matmul_tflop_s"] > 100)
    return judged(is_right, "slower than any GPU that this is for: is it shared, or throttled?", **figures)


def _rate(kind: str, sizes: list[int], side: Side) -> dict[str, float]:
    side.rehearse_on_cpu(kind)
    found = {}
    with own_stream(side.device):
        for size in sizes:
            link = side.open(kind, f"slots-{size}", slot_bytes=size, num_slots=4, window=4, op_timeout_s=20.0)
            number = max(8, min(256, 2**32 // size)) if not is_rehearsal() else 8
            began = 0.0
            for index in range(number + 4):
                if index == 4:
                    began = time.monotonic()
                slot = taken(link.slots.acquire(10.0))
                if side.sends:
                    slot.write_header(header_of(size))
                    link.send_chunk(slot, size).wait()
                else:
                    link.recv_chunk(slot, size).wait()
                link.slots.release(slot)
            if not side.sends:
                link.settle()
            found[f"{size / 2**20:g} MiB"] = round(number * size / (time.monotonic() - began) / 1e9, 2)
            side.meet(f"moved-{size}")
            link.close()
    return found


def slots(kind: str) -> Found:
    """A transport's rate by the size of its slots, without gathers and checksums; `handover-*` has those."""
    require_kind(kind)
    sizes = [2**16, 2**18] if is_rehearsal() else [2**22, 2**24, 2**25, 2**26]
    _, received = two(partial(_rate, kind, sizes), 100.0)
    best = max(received.values())
    return judged(kind != "ipc" or is_rehearsal() or best >= 100, "a copy on one GPU is faster", gb_s=received)


# -- a model of 8B parameters ----------------------------------------------------------------------------------------


def model_8b() -> Path:
    """The folder, made once for all checks; `remove-8b` removes it."""
    if not (MODEL / "config.json").exists():
        made = make_folder(SMALL if is_rehearsal() else LLAMA_8B, dtype="float32" if is_rehearsal() else "bfloat16")
        shutil.rmtree(MODEL, ignore_errors=True)
        made.rename(MODEL)
    return MODEL


def remove_8b() -> Found:
    shutil.rmtree(MODEL, ignore_errors=True)
    return judged(True)


def _fields() -> dict[str, Any]:
    return SMALL if is_rehearsal() else LLAMA_8B


def _num_weights() -> int:
    """Those that a step reads: all but the embedding."""
    f = _fields()
    attended = 2 * f["hidden_size"] * f["head_dim"] * (f["num_attention_heads"] + f["num_key_value_heads"])
    layer = attended + 3 * f["hidden_size"] * f["intermediate_size"]
    return int(f["num_hidden_layers"] * layer + f["hidden_size"] * f["vocab_size"])


def _kv_bytes(num_tokens: int) -> int:
    f = _fields()
    return int(2 * 2 * f["num_hidden_layers"] * f["num_key_value_heads"] * f["head_dim"] * num_tokens)


def _engine(num_tokens: int, step_tokens: int, attention: str = "auto") -> Any:
    dtype = "float32" if is_rehearsal() else "bfloat16"
    runner = runner_of(model_8b(), dtype=dtype, num_blocks=num_tokens // 16 + 64, attention=attention)
    return engine_of(runner, step_tokens=step_tokens)


def _step(engine: Any) -> None:
    batch, _ = engine.schedule(0.0)
    engine.commit(batch, engine.runner.execute(batch), 0.0)


def decode(case: str) -> Found:
    """Steps of a batch, after its prompts: their time against the bytes that they read, and what the host adds."""
    size, _, attention = case.partition(" ")
    if attention == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise NotRun("flashinfer-python is not installed")
    batch, length = (int(part) for part in size.split("x"))
    if is_rehearsal():
        batch, length = min(batch, 4), 32
    num_prompt_steps = 2 + batch * length // (STEP_TOKENS - batch)  # in which those that have begun go on
    num_tokens = num_prompt_steps + NUM_WARM + 2 * NUM_STEPS + 2
    engine = _engine(batch * (length + num_tokens + 16), STEP_TOKENS, attention or "auto")
    for number, prompt in enumerate(prompts_of([length] * batch)):
        engine.add(spec_of(f"s{number}", prompt, num_tokens), Purpose.GENERATE, now=0.0)
    while any(sequence.num_computed_tokens < length for sequence in engine.sequences.values()):
        _step(engine)
    steps = StepsAhead(engine)
    for _ in range(NUM_WARM):
        steps.next()
    steps.host.clear()
    began = time.perf_counter()
    for _ in range(NUM_STEPS):
        steps.next()
    step_s = (time.perf_counter() - began) / NUM_STEPS
    kv_bytes = _kv_bytes(batch * (length + NUM_STEPS))
    share = (2 * _num_weights() + kv_bytes) / bandwidth() / step_s
    figures: dict[str, Any] = {"step_ms": round(step_s * 1e3, 3), "tokens_s": round(batch / step_s)}
    figures |= {"roofline_share": round(share, 3), "ahead": f"{steps.num_ahead} of {NUM_WARM + NUM_STEPS}"}
    figures["host_us"] = {name: round(us / NUM_STEPS) for name, us in steps.host.items()}
    if len(engine.sequences) < batch:
        return judged(False, f"{len(engine.sequences)} of {batch} sequences were left when steps were measured")
    if is_rehearsal():
        return judged(steps.num_ahead == NUM_WARM + NUM_STEPS, "steps were not planned ahead", **figures)
    figures |= _breakdown(steps, kv_bytes)
    is_right = share >= 0.8 and figures["gap_us"] < 100 and (length < 4096 or figures["attention_share"] >= 0.6)
    return judged(is_right, "below the roofline, or the host holds steps up", **figures)


class StepsAhead:
    """Steps of an engine, each launched before what came of the one before it is read: as a worker's that plans ahead.

    Attributes:
        num_ahead: steps that were.
        host: microseconds that each thing the host does has taken, `wait` being for the device.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.num_ahead = 0
        self.host: Counter[str] = Counter()
        self._step = engine.schedule(0.0)[0]
        self._launched = engine.runner.launch(self._step)

    def next(self, *, is_marked: bool = False) -> None:
        """Launches the next step, and reads the one before it.

        Args:
            is_marked: whether the device is given a kernel between the two that does nothing.
        """
        engine = self._engine
        scheduled = self._timed("schedule", engine.schedule_ahead, self._step, 0.0)
        if scheduled is not None:
            self.num_ahead += 1
            following = scheduled[0], self._launch(scheduled[0], is_marked)
        output = self._timed("wait", self._launched.collect)
        self._timed("commit", engine.commit, self._step, output, 1.0)
        if scheduled is None:
            step = engine.schedule(0.0)[0]
            following = step, self._launch(step, is_marked)
        self._step, self._launched = following

    def _launch(self, step: Any, is_marked: bool) -> Any:
        if is_marked:
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        return self._timed("launch", self._engine.runner.launch, step)

    def _timed(self, name: str, job: Any, *args: Any) -> Any:
        began = time.perf_counter()
        found = job(*args)
        self.host[name] += round((time.perf_counter() - began) * 1e6)
        return found


class Span(NamedTuple):
    """A kernel or a copy, in microseconds."""

    start: float
    end: float
    name: str


def _breakdown(steps: StepsAhead, kv_bytes: int) -> dict[str, Any]:
    """Kernels of some steps, and the time in which none ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(NUM_STEPS // 2):
            steps.next(is_marked=True)
        synchronize()
    spans = sorted(
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type.name == "CUDA"
    )
    return figures_of(spans, kv_bytes / bandwidth())


def figures_of(spans: Sequence[Span], reading_s: float) -> dict[str, Any]:
    """What spans of several steps, with a mark before each, say of one of them.

    Args:
        spans: in the order in which they start.
        reading_s: what the device takes to read the KV of a step.
    """
    marks = [place for place, span in enumerate(spans) if MARK in span.name]
    by_step = [spans[begin + 1 : end] for begin, end in pairwise([*marks, len(spans)])]
    gaps = [
        spans[mark + 1].start - spans[mark - 1].end - (spans[mark].end - spans[mark].start)
        for mark in marks
        if 0 < mark < len(spans) - 1
    ]
    busy_us, idle_us, attending_us = 0.0, 0.0, 0.0
    by_name: defaultdict[str, float] = defaultdict(float)
    for step in by_step:
        last = step[0].start
        for start, end, name in step:
            by_name[name[:70]] += end - start
            idle_us += max(0.0, start - last)
            busy_us += max(0.0, end - max(start, last))
            attending_us += (end - start) if any(part in name for part in ATTENTION) else 0.0
            last = max(last, end)
    number = len(by_step)
    attention_s = max(attending_us, 1e-3) / number / 1e6
    longest = heapq.nlargest(8, by_name.items(), key=itemgetter(1))
    return {
        "kernels_a_step": sum(map(len, by_step)) // number,
        "kernels_ms": round(busy_us / number / 1e3, 3),
        "gap_us": round(statistics.median(gaps), 1),
        "longest_gap_us": round(max(gaps), 1),
        "idle_in_step_us": round(idle_us / number, 1),
        "attention_ms": round(attention_s * 1e3, 3),
        "attention_share": round(reading_s / attention_s, 3),
        "longest_ms": {name: round(us / number / 1e3, 3) for name, us in longest},
    }


def prefill() -> Found:
    """A prompt of 8,192 tokens in one step, against the rate of a matrix product."""
    length = 256 if is_rehearsal() else 8192
    engine = _engine(4 * length, length)
    times = []
    for number, prompt in enumerate(prompts_of([length] * 3)):
        engine.add(spec_of(f"p{number}", prompt, 1), Purpose.GENERATE, now=0.0)
        synchronize()
        began = time.perf_counter()
        _step(engine)
        times.append(time.perf_counter() - began)
    f = _fields()
    attention = 2 * f["num_hidden_layers"] * f["num_attention_heads"] * f["head_dim"] * length**2
    layers = _num_weights() - f["hidden_size"] * f["vocab_size"]
    share = (2 * layers * length + attention) / min(times[1:]) / matmul_rate()
    figures = {"first_s": round(times[0], 3), "s": round(min(times[1:]), 4), "tokens_s": round(length / min(times[1:]))}
    return judged(is_rehearsal() or share >= 0.65, "far below the rate of products", share=round(share, 3), **figures)
