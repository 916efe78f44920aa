"""Attention and tokens against the CPU, memory, and what errors of the device leave behind."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.hour.checks import Found, NotRun, is_rehearsal, judged
from tests.gpu.hour.models import (
    SMALL,
    Shape,
    answers,
    device_name,
    engine_of,
    make_folder,
    parting,
    prompts_of,
    runner_of,
    synchronize,
)

LENGTHS = (1, 15, 16, 17, 100, 300, 700, 1500)
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
SHAPES = (Shape(), Shape(128, 8, 1), Shape(128, 8, 8), Shape(256, 4, 2), Shape(64, 8, 2, 256))


def kernel_module() -> str:
    """The module of Baton's own kernels; empty: this version has none."""
    for name in ("kernel_attention", "kernels"):
        if importlib.util.find_spec(f"engine.model.{name}") is not None:
            return f"engine.model.{name}"
    return ""


def fields_of(shape: Shape) -> dict[str, Any]:
    width = shape.head_dim * shape.heads
    return {
        "hidden_size": width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 2,
    }


def attention() -> Found:
    """Log probabilities of a prompt in chunks, and of decoding beside others, on this device and on a CPU."""
    worst: dict[str, float] = {}
    for shape in SHAPES[:2] if is_rehearsal() else SHAPES:
        folder = make_folder(fields_of(shape), shape.window)
        prompts = prompts_of(LENGTHS[:5] if is_rehearsal() else LENGTHS)
        here, there = (
            answers(engine_of(runner_of(folder, device=device), step_tokens=256), prompts, 8, scored=True)
            for device in (device_name(), "cpu")
        )
        error = 0.0
        for ours, theirs in zip(here, there, strict=True):
            place = next((place for place, _ in parting(ours, theirs)), len(ours.tokens))
            differences = [abs(a - b) for a, b in zip(ours.logprobs[:place], theirs.logprobs[:place], strict=True)]
            error = max(error, *differences, 0.0)
        worst[f"{shape.head_dim}x{shape.heads}/{shape.kv_heads}{f' window {shape.window}' if shape.window else ''}"] = (
            error
        )
    figures = {"kernels": kernel_module() or "not built", "worst_error": worst}
    return judged(max(worst.values()) < 1e-3, "log probabilities differ from the CPU's", **figures)


def kernel() -> Found:
    """Whether the engine attends with Baton's own kernel here."""
    if not (module := kernel_module()):
        raise NotRun("not built: this version has no kernels of its own; `attention` has compared what it uses")
    if importlib.util.find_spec("triton") is None:
        raise NotRun("triton is not installed")
    runner = runner_of(make_folder())
    prompts = prompts_of((40, 300))
    engine = engine_of(runner)
    answers(engine, prompts, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        answers(engine, prompts, 4)
        synchronize()
    names = sorted({event.key for event in profile.key_averages()})
    own = [name for name in names if name in ("attend", "combine", "write") or "_attend" in name]
    return judged(bool(own), "no kernel of its own was launched", module=module, launched=own, others=names[:30])


def tokens(dtype: str) -> Found:
    """Greedy answers to prompts of mixed lengths, on this device and on a CPU: they part at near ties only."""
    folder = make_folder()
    prompts = prompts_of(LENGTHS)
    num_tokens = 8 if is_rehearsal() else 32
    engine = engine_of(runner_of(folder, dtype=dtype))
    here = answers(engine, prompts, num_tokens)
    with_scores = answers(engine, prompts, num_tokens, scored=True)
    there = answers(engine_of(runner_of(folder, device="cpu", dtype=dtype)), prompts, num_tokens, scored=True)
    margins = [margin for ours, theirs in zip(here, there, strict=True) for _, margin in parting(ours, theirs)]
    sampled_twice = sum(one.tokens != other.tokens for one, other in zip(here, with_scores, strict=True))
    figures = {
        "answers": len(prompts),
        "parted": len(margins),
        "margins": margins,
        "with_scores_differ": sampled_twice,
    }
    is_right = all(margin <= NEAR_TIE[dtype] for margin in margins)
    return judged(is_right, "answers part where no near tie is", **figures)


def memory() -> Found:
    """The peak beside weights and pool over a batch of 64 mixed lengths, against what an automatic pool leaves free."""
    num = 8 if is_rehearsal() else 64
    lengths = [32 + (number * 977) % (200 if is_rehearsal() else 4000) for number in range(num)]
    if not is_rehearsal():
        lengths[0] = 15_000
    folder = make_folder(dtype="float32")
    blocks = sum(math.ceil((length + 24) / 16) for length in lengths) + 8
    engine = engine_of(runner_of(folder, dtype="bfloat16", num_blocks=blocks), max_num_seqs=num, step_tokens=2048)
    if is_rehearsal():
        answers(engine, prompts_of(lengths), 4)
        return judged(True, sequences=num)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    answers(engine, prompts_of(lengths), 8)
    peak = torch.cuda.max_memory_allocated() - before
    _, total = torch.cuda.mem_get_info()
    left = 0.15 * (total - before)
    figures = {"sequences": num, "longest": max(lengths), "peak_mib": peak >> 20, "left_free_mib": int(left) >> 20}
    kv_bytes = 2 * SMALL["num_hidden_layers"] * SMALL["num_key_value_heads"] * SMALL["head_dim"] * 2 * sum(lengths)
    figures["kv_mib"] = kv_bytes >> 20
    return judged(peak < left, "a step takes more than an automatic pool leaves", **figures)


def backends() -> Found:
    """No step falls back to torch's attention that writes all scores out, or to a plan a shape."""
    engine = engine_of(runner_of(make_folder(), dtype="bfloat16"), step_tokens=256)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found = answers(engine, prompts_of((3, 700, 1500)), 8)
    return judged(all(len(answer.tokens) == 8 for answer in found), "an answer is short")


def out_of_memory() -> Found:
    """A step that finds no memory is computed in halves, or refused, and the engine's next one is right."""
    folder = make_folder()
    engine = engine_of(runner_of(folder), step_tokens=2048)
    prompts = prompts_of((1500,))
    expected = answers(engine, prompts, 4)[0].tokens
    hog = []
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog.append(torch.empty(free - (8 << 20), dtype=torch.uint8, device="cuda"))
    num_before = torch.cuda.memory_stats()["num_ooms"]
    try:
        beside = answers(engine_of(engine.runner, step_tokens=2048), prompts, 4)[0].tokens  # type: ignore[arg-type]
        kind = "computed in halves" if beside == expected else "other tokens"
    except (torch.OutOfMemoryError, AssertionError) as error:
        kind = f"refused: {type(error).__name__}"
    num_times = torch.cuda.memory_stats()["num_ooms"] - num_before
    hog.clear()
    torch.cuda.empty_cache()
    recover = getattr(engine.runner, "recover", None)
    if recover is not None:
        recover()
    again = answers(engine_of(engine.runner, step_tokens=2048), prompts, 4)[0].tokens  # type: ignore[arg-type]
    is_right = again == expected and kind != "other tokens" and num_times > 0
    reason = "memory was not short, or what was computed then or later is not right"
    return judged(is_right, reason, step=kind, times_out_of_memory=num_times, same=again == expected)


def sticky() -> Found:
    """After an assertion on the device nothing computes in this process, and `recover` says so."""
    runner = runner_of(make_folder())
    kinds = []
    try:
        torch.zeros(4, device="cuda")[torch.tensor([99], device="cuda")].sum().item()
    except RuntimeError as error:
        kinds.append(type(error).__name__)
    try:
        answers(engine_of(runner), prompts_of((20,)), 2)
    except RuntimeError as error:
        kinds.append(type(error).__name__)
    recover = getattr(runner, "recover", None)
    if recover is None:
        return judged(len(kinds) == 2, "a dead context went on", errors=kinds, recover="not built")
    try:
        recover()
    except Exception as error:
        return judged(len(kinds) == 2, "a dead context went on", errors=kinds, recover=type(error).__name__)
    return judged(False, "`recover` takes a dead context for a good one", errors=kinds, recover="none")
