"""What is timed: the machine's rates, a transport's by slot size, and an 8B Llama of random weights against both."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.core.sequence import Purpose
from kvstore.transfer.transport.streams import own_stream
from tests.gpu.hour.checks import Found, NotRun, is_rehearsal, judged, report_part
from tests.gpu.hour.ends import Side, header_of, require_kind, taken, two
from tests.gpu.hour.kernels import StepsAhead, figures_of, mark, profiled
from tests.gpu.hour.models import (
    LLAMA_8B,
    SMALL,
    device_name,
    engine_of,
    few_graphs,
    make_folder,
    prompts_of,
    runner_of,
    spec_of,
    synchronize,
)

NUM_WARM, NUM_STEPS, NUM_PROFILED = (2, 4, 2) if is_rehearsal() else (4, 24, 12)
STEP_TOKENS, PROMPT_TOKENS = 2048, 8192
"""Tokens of a step in which prompts of decodes are computed, and of one of a prompt that is timed."""
MAX_SEQS = 256
GRAPH_SIZES = (1, 64, 256)
"""Of the graphs that a worker captures for so many sequences, those that are used: a capture takes the card's time."""


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


@cache
def bandwidth() -> float:
    """Bytes a second that the device reads and writes in a large copy."""
    size = 2**24 if is_rehearsal() else 2**31
    source, target = (torch.empty(size, dtype=torch.uint8, device=device_name()) for _ in range(2))
    return 2 * size / _median_s(lambda: target.copy_(source))


@cache
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
    """A transport's rate by the size of its slots, without gathers and checksums; `kv_transfer-*` has those."""
    require_kind(kind)
    sizes = [2**16, 2**18] if is_rehearsal() else [2**22, 2**24, 2**25, 2**26]
    _, received = two(partial(_rate, kind, sizes), 100.0)
    best = max(received.values())
    return judged(kind != "ipc" or is_rehearsal() or best >= 100, "a copy on one GPU is faster", gb_s=received)


# -- a model of 8B parameters ----------------------------------------------------------------------------------------


class Decode(NamedTuple):
    """Decode steps of a batch.

    Attributes:
        products, attention: least shares of the device's rate that these kernels should have; 0: figures alone.
        rest_ms: the most that a step should take beyond these kernels; 0: a figure alone.
    """

    batch: int
    length: int
    top_p: float = 1.0
    products: float = 0.0
    attention: float = 0.0
    rest_ms: float = 0.0


DECODES = {
    "1": Decode(1, 512, products=0.92, rest_ms=0.5),
    "64": Decode(64, 512, products=0.92, rest_ms=0.6),
    "sampled-64": Decode(64, 512, top_p=0.9),
    "64-4k": Decode(64, 4096, products=0.92, attention=0.85),
    "256": Decode(256, 512),
}
SAMPLED_TIMES = 1.05
"""What a step that samples by top-p may take, in times of a greedy one."""
PREFILL_SHARE = 0.65


def model_8b() -> Path:
    """The folder, made once for all checks of a run, whose temporary folder it is in."""
    folder = Path(tempfile.gettempdir()) / "baton-hour-8b"
    if not (folder / "config.json").exists():
        made = make_folder(SMALL if is_rehearsal() else LLAMA_8B, dtype="float32" if is_rehearsal() else "bfloat16")
        made.rename(folder)
    return folder


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


class Speed:
    """Everything that one model, loaded once, is timed with; each part is reported as soon as it is known.

    Args:
        attention: `engine.attention`.
    """

    def __init__(self, attention: str) -> None:
        self._prefix = "" if attention == "auto" else f"{attention}-"
        self._lengths = (256, 512) if is_rehearsal() else (8192, 32_768)
        self._decodes = {name: self._in_small(each) for name, each in DECODES.items()}
        self._step_s: dict[str, float] = {}
        few_graphs(*GRAPH_SIZES)
        most = max(each.batch * (each.length + self._num_tokens(each) + 16) for each in self._decodes.values())
        began = time.perf_counter()
        self._runner = runner_of(
            model_8b(),
            dtype="float32" if is_rehearsal() else "bfloat16",
            num_blocks=max(most, 2 * self._lengths[-1]) // 16 + MAX_SEQS,
            max_num_seqs=MAX_SEQS,
            attention=attention,
        )
        self.loaded_s = round(time.perf_counter() - began, 1)

    def decode(self, name: str) -> list[Found]:
        """Times steps of a batch; then a profile says which kernels take the time."""
        case = self._decodes[name]
        steps = self._prepared(case)
        whole = report_part(f"{self._prefix}decode-{name}", lambda: self._timed(name, case, steps))
        parts = report_part(f"{self._prefix}kernels-{name}", lambda: self._by_kind(name, case, steps))
        steps.end()
        return [whole, parts]

    def prefill(self, name: str, length: int) -> list[Found]:
        """Times prompts, in steps of 8,192 tokens, against the rate of a matrix product."""
        return [report_part(f"{self._prefix}prefill-{name}", lambda: self._prompts(length))]

    def prefill_8k(self) -> list[Found]:
        return self.prefill("8k", self._lengths[0])

    def prefill_32k(self) -> list[Found]:
        return self.prefill("32k", self._lengths[1])

    @staticmethod
    def _in_small(case: Decode) -> Decode:
        return case._replace(batch=min(case.batch, 4), length=32) if is_rehearsal() else case

    @staticmethod
    def _num_tokens(case: Decode) -> int:
        """Tokens of an answer: none ends before the last step that is timed."""
        num_prompt_steps = 2 + case.batch * case.length // (STEP_TOKENS - case.batch)
        return num_prompt_steps + NUM_WARM + NUM_STEPS + NUM_PROFILED + 4

    def _prepared(self, case: Decode) -> StepsAhead:
        engine = engine_of(self._runner, max_num_seqs=MAX_SEQS, step_tokens=STEP_TOKENS)
        for number, prompt in enumerate(prompts_of([case.length] * case.batch)):
            drawn: dict[str, Any] = {} if case.top_p == 1.0 else {"temperature": 1.0, "top_p": case.top_p}
            engine.add(spec_of(f"s{number}", prompt, self._num_tokens(case), **drawn), Purpose.GENERATE, now=0.0)
        while any(sequence.num_computed_tokens < case.length for sequence in engine.sequences.values()):
            step(engine)
        return StepsAhead(engine)

    def _timed(self, name: str, case: Decode, steps: StepsAhead) -> Found:
        for _ in range(NUM_WARM):
            steps.next()
        steps.host.clear()
        began = time.perf_counter()
        for _ in range(NUM_STEPS):
            steps.next()
        step_s = self._step_s[name] = (time.perf_counter() - began) / NUM_STEPS
        floor_s = (2 * _num_weights() + _kv_bytes(case.batch * (case.length + NUM_STEPS))) / bandwidth()
        figures: dict[str, Any] = {
            "step_ms": round(step_s * 1e3, 3),
            "tokens_s": round(case.batch / step_s),
            "roofline_share": round(floor_s / step_s, 3),
            "ahead": f"{steps.num_ahead} of {NUM_WARM + NUM_STEPS}",
            "host_us": {what: round(us / NUM_STEPS) for what, us in steps.host.items()},
            "loaded_s": self.loaded_s,
        }
        reasons = [] if steps.num_ahead == NUM_WARM + NUM_STEPS else ["steps were not planned ahead"]
        if case.top_p < 1.0 and (greedy_s := self._step_s.get("64")):
            figures["times_greedy"] = round(step_s / greedy_s, 3)
            if step_s > SAMPLED_TIMES * greedy_s and not is_rehearsal():
                reasons.append(f"sampling takes more than {SAMPLED_TIMES:g} times a greedy step")
        return judged(not reasons, "; ".join(reasons), **figures)

    def _by_kind(self, name: str, case: Decode, steps: StepsAhead) -> Found:
        def run() -> None:
            for _ in range(NUM_PROFILED):
                steps.next(is_marked=True)

        figures = figures_of(profiled(run))
        if (step_s := self._step_s.get(name)) is None:
            return judged(False, "steps were not timed", **figures)
        products_s = max(2 * _num_weights() / bandwidth(), 2 * _num_weights() * case.batch / matmul_rate())
        attention_s = _kv_bytes(case.batch * (case.length + NUM_WARM + NUM_STEPS)) / bandwidth()
        figures |= {
            "products_share": share_of(products_s, figures["products_ms"]),
            "attention_share": share_of(attention_s, figures["attention_ms"]),
            "beyond_ms": round(step_s * 1e3 - figures["products_ms"] - figures["attention_ms"], 3),
        }
        if is_rehearsal():
            return judged(figures["kernels_a_step"] > 0, "no kernel was seen", **figures)
        reasons = gates_missed(case, figures)
        return judged(not reasons, "; ".join(reasons), **figures)

    def _prompts(self, length: int) -> Found:
        engine = engine_of(self._runner, max_num_seqs=MAX_SEQS, step_tokens=min(length, PROMPT_TOKENS))
        times = []

        def run(number: int, prompt: list[int]) -> None:
            engine.add(spec_of(f"p{number}", prompt, 1), Purpose.GENERATE, now=0.0)
            synchronize()
            began = time.perf_counter()
            mark()
            while (batch := engine.schedule(0.0)[0]).parts:
                engine.commit(batch, engine.runner.execute(batch), 0.0)
            times.append(time.perf_counter() - began)

        first, second, third = prompts_of([length] * 3)
        run(0, first)
        run(1, second)
        spans = profiled(lambda: run(2, third))
        f = _fields()
        attention = 2 * f["num_hidden_layers"] * f["num_attention_heads"] * f["head_dim"] * length**2
        layers = 2 * (_num_weights() - f["hidden_size"] * f["vocab_size"]) * length
        share = (layers + attention) / times[1] / matmul_rate()
        found = figures_of(spans)
        figures = {
            "first_s": round(times[0], 3),
            "s": round(times[1], 4),
            "tokens_s": round(length / times[1]),
            "share": round(share, 3),
            "products_share": share_of(layers / matmul_rate(), found["products_ms"]),
            "attention_share": share_of(attention / matmul_rate(), found["attention_ms"]),
            **{name: found[name] for name in ("products_ms", "attention_ms", "rest_ms", "longest_ms")},
        }
        is_right = is_rehearsal() or share >= PREFILL_SHARE or length > PROMPT_TOKENS
        return judged(is_right, f"less than {PREFILL_SHARE:g} of the rate of products", **figures)


def share_of(least_s: float, took_ms: float) -> float:
    """Returns the part of the device's rate that kernels have had: what they cannot be faster than, over their time."""
    return round(least_s / max(took_ms / 1e3, 1e-6), 3)


def gates_missed(case: Decode, figures: dict[str, Any]) -> list[str]:
    """Returns what of the figures is worse than it should be, in words."""
    reasons = [
        f"{kind} reach {figures[f'{kind}_share']:g} of the device's rate, not {least:g}"
        for kind, least in (("products", case.products), ("attention", case.attention))
        if figures[f"{kind}_share"] < least
    ]
    if case.rest_ms and figures["beyond_ms"] > case.rest_ms:
        reasons.append(f"a step takes {figures['beyond_ms']:g} ms beyond products and attention, not {case.rest_ms:g}")
    return reasons


def step(engine: Any) -> None:
    batch, _ = engine.schedule(0.0)
    engine.commit(batch, engine.runner.execute(batch), 0.0)


def everything(attention: str) -> Found:
    """Everything of one model that is loaded once, what proves most first; of FlashInfer, decodes alone."""
    if attention == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise NotRun("flashinfer-python is not installed")
    found = [report_part("rates", rates)] if attention == "auto" else []
    each = Speed(attention)
    found += each.decode("1") + each.decode("64")
    if attention == "auto":
        found += each.decode("sampled-64") + each.prefill_8k() + each.decode("64-4k")
        found += each.prefill_32k() + each.decode("256")
    failed = sum(part.status == "fail" for part in found)
    return judged(not failed, f"{failed} of {len(found)} parts failed", parts=len(found), loaded_s=each.loaded_s)
