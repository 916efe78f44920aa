"""8-bit floats: weights and KV pages, whether they are right, and how fast."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

from engine.core.sequence import Purpose
from engine.model.fp8_linear import Fp8Linear, quantized_rows
from tests.gpu.hour.checks import Found, NotRun, is_rehearsal, judged
from tests.gpu.hour.models import (
    LLAMA_8B,
    answers,
    device_name,
    engine_of,
    few_graphs,
    make_folder,
    prompts_of,
    runner_of,
    spec_of,
    synchronize,
)
from tests.gpu.hour.speed import bandwidth, model_8b

SHAPES = ((1, 4096, 6144), (64, 4096, 28672), (300, 14336, 4096), (5, 64, 48))
NUM_WARM, NUM_STEPS = 4, 24


def _require_fp8() -> None:
    if not is_rehearsal() and torch.cuda.get_device_capability() < (8, 9):
        raise NotRun("this GPU does not multiply 8-bit floats")


def products() -> Found:
    """Rows as the kernel rounds them against torch's, and products against those of what was rounded, in float32."""
    _require_fp8()
    device = device_name()
    unlike, worst = 0, 0.0
    for num_rows, num_inputs, num_outputs in SHAPES[3:] if is_rehearsal() else SHAPES:
        linear = nn.Linear(num_inputs, num_outputs, dtype=torch.bfloat16, device=device).requires_grad_(False)
        rows = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device=device)
        rows[-1] *= 1e4
        module = Fp8Linear.of(linear).to(device)
        found = module(rows[None])[0].float()
        codes, scale = quantized_rows(rows)
        by_kernel = module.quantized(rows)
        unlike += int((by_kernel[0].view(torch.uint8) != codes.view(torch.uint8)).sum())
        unlike += int((by_kernel[1] != scale).sum())
        assert module.bias is not None
        expected = (codes.float() * scale) @ (module.weight.float() * module.scale.t()).t() + module.bias.float()
        size = expected.abs().amax(1, keepdim=True)
        worst = max(worst, float(((found - expected).abs() / size).max()))
    figures = {"bytes_unlike_torchs": unlike, "worst_error": worst}
    return judged(unlike == 0 and worst < 1e-2, "products are not those of what was rounded", **figures)


def tokens() -> Found:
    """Greedy answers over pages and weights of 8-bit floats: how far they go before they part from exact ones."""
    _require_fp8()
    folder, prompts = make_folder(), prompts_of((1, 16, 17, 100, 300, 700))
    expected = answers(engine_of(runner_of(folder, dtype="bfloat16")), prompts, 16)
    figures: dict[str, Any] = {}
    for weights, kv_dtype in (("exact", "fp8"), ("fp8", "auto"), ("fp8", "fp8")):
        runner = runner_of(folder, dtype="bfloat16", weights=weights, kv_dtype=kv_dtype)
        found = answers(engine_of(runner), prompts, 16, scored=True)
        same = [
            next((at for at, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), 16)
            for one, other in zip(found, expected, strict=True)
        ]
        figures[f"weights {weights}, KV {kv_dtype}"] = {
            "tokens_before_parting": same,
            "computes": runner.computes.in_words(),
        }
        if not all(torch.tensor(one.logprobs).isfinite().all() for one in found):
            return judged(False, "log probabilities are no numbers", **figures)
    return judged(True, **figures)


def decode(case: str) -> Found:
    """Steps of a batch of the 8B model with weights of 8-bit floats, over pages of bfloat16 and of 8-bit floats."""
    _require_fp8()
    few_graphs(1, 64)
    batch, length = (int(part) for part in case.split("x"))
    num_tokens = NUM_WARM + NUM_STEPS + 2
    figures: dict[str, Any] = {}
    for weights, kv_dtype in (("fp8", "auto"), ("fp8", "fp8")):
        began = time.perf_counter()
        blocks = batch * (length + num_tokens + 16) // 16 + 64
        kinds = {"weights": weights, "kv_dtype": kv_dtype}
        runner = runner_of(model_8b(), dtype="bfloat16", num_blocks=blocks, **kinds)
        loaded_s, engine = time.perf_counter() - began, engine_of(runner, step_tokens=2048)
        for number, prompt in enumerate(prompts_of([length] * batch)):
            engine.add(spec_of(f"s{number}", prompt, num_tokens), Purpose.GENERATE, now=0.0)
        times: list[float] = []
        while len(times) < NUM_WARM + NUM_STEPS:
            began = time.perf_counter()
            planned, _ = engine.schedule(0.0)
            engine.commit(planned, engine.runner.execute(planned), 0.0)
            if all(sequence.num_computed_tokens >= length for sequence in engine.sequences.values()):
                times.append(time.perf_counter() - began)
        synchronize()
        step_s = statistics.median(times[NUM_WARM:])
        figures[f"weights {weights}, KV {kv_dtype}"] = {
            "loaded_s": round(loaded_s, 1),
            "step_ms": round(step_s * 1e3, 3),
            "roofline_share": round(_bytes_read(batch * length, kv_dtype) / bandwidth() / step_s, 3),
            "weights_gib": round(sum(each.nbytes for each in runner.rank.model.buffers()) / 2**30, 2),
        }
        del engine, runner
        torch.cuda.empty_cache()
    return judged(True, **figures)


def _bytes_read(num_tokens: int, kv_dtype: str) -> float:
    f = LLAMA_8B
    attended = 2 * f["hidden_size"] * f["head_dim"] * (f["num_attention_heads"] + f["num_key_value_heads"])
    layer = attended + 3 * f["hidden_size"] * f["intermediate_size"]
    kv = 2 * f["num_hidden_layers"] * f["num_key_value_heads"] * f["head_dim"] * (1 if kv_dtype == "fp8" else 2)
    return f["num_hidden_layers"] * layer + 2 * f["hidden_size"] * f["vocab_size"] + kv * num_tokens
