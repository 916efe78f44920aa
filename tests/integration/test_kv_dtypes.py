"""Narrower pages: what is rounded into them is what everybody attends to, whatever is computed together."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import EngineConfig, ModelConfig, TestingConfig, TransferConfig, load
from baton.errors import ConfigError, ModelLoadError
from baton.memory import GIB
from deploy.models import cache_dir
from engine.core.engine import Engine
from engine.core.runner import ignore_layer
from engine.model.logits_runner import LogitsRunner
from engine.model.rank_step import RankStep
from engine.model.transformers_runner import TransformersRunner
from engine.native import build
from engine.native.runner import NativeRunner
from engine.native.spec import FAMILIES
from engine.runners import make_runner
from engine.testing import arithmetic_runner
from kvstore.transfer.protocol.plan import layout_of, mismatch
from tests.integration.test_engine_models import (
    ENGINE,
    VOCAB_SIZE,
    answers,
    drafted_and_plain,
    engine_of,
    make_spec,
    save_tiny,
)
from tests.integration.test_native_models import UNEVEN, all_logits, native_runner, part_of, same_bits, spoil
from worker.member import wire_compat

pytestmark = pytest.mark.integration
NARROW = ["bfloat16", "int8"]
HEAD_DIM = 64
CLOSE = {"bfloat16": 0.1, "int8": 0.25}
"""Most that logits of about 1 may differ from those over float32 pages; the models here are random."""


def with_pages(kv_dtype: str, **settings: Any) -> EngineConfig:
    return replace(ENGINE, kv_dtype=kv_dtype, **settings)


def transformers_runner(folder: Path, kv_dtype: str, **model: Any) -> TransformersRunner:
    given = ModelConfig(path=str(folder), device="cpu", **model)
    return TransformersRunner(given, with_pages(kv_dtype), keeps_all=FAMILIES)


def native_engine(folder: Path, kv_dtype: str, **settings: Any) -> Engine:
    config = with_pages(kv_dtype, **settings)
    return engine_of(native_runner(folder, config), config)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    save_tiny("qwen3", UNEVEN, folder)
    return folder


def draws(seed: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", NARROW)
def test_logits_are_the_same_bits_in_any_batch_chunk_and_number_of_threads(kv_dtype: str, uneven: Path) -> None:
    draw, prompts = random.Random(41), draws(41, 1, 150, 33, 64, 7)
    runner = native_runner(uneven, with_pages(kv_dtype))
    alone = [all_logits(runner, [prompt], draw, 1)[0] for prompt in prompts]
    for most in (1, 3, 48):
        assert same_bits(all_logits(runner, prompts, draw, most), alone), f"chunks of up to {most}"
    runner.close()
    two = native_runner(uneven, with_pages(kv_dtype, num_threads=2, block_size=32, num_blocks=48))
    assert same_bits(all_logits(two, prompts, draw, 48), alone), "two threads, larger blocks"
    two.close()
    exact = native_runner(uneven)
    for ours, reference in zip(alone, all_logits(exact, prompts, draw, 48), strict=True):
        difference = float((ours - reference).abs().max())
        assert 0 < difference < CLOSE[kv_dtype] * float(reference.abs().max()), difference
    exact.close()


@pytest.mark.full
@pytest.mark.parametrize("kv_dtype", NARROW)
def test_logits_are_the_same_bits_on_every_variant(
    kv_dtype: str, uneven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, prompts = random.Random(42), draws(42, 100, 1, 30)
    found = []
    for variant in build.VARIANTS:
        if build.VARIANTS[variant] <= build.cpu_flags():
            monkeypatch.setattr(build, "variant_of", lambda flags, variant=variant: variant)
            runner = native_runner(uneven, with_pages(kv_dtype))
            found.append(all_logits(runner, prompts, draw, 48))
            runner.close()
    assert len(found) > 1 or build.variant_of(build.cpu_flags()) == "x86-64-v3"
    assert all(same_bits(one, found[0]) for one in found)


def pages_of(runner: LogitsRunner, prompt: list[int]) -> torch.Tensor:
    """Layer 0's K and V of a prompt, which no attention has touched: `[2, blocks * heads * tokens, values]`."""
    table = [5, 2, 8]
    runner._compute(RankStep([part_of(prompt, 0, len(prompt), table)], [0]), ignore_layer)
    group = runner.spec.groups[0]
    pages = runner.caches[0].groups[0][0, table]
    pages = pages.view(len(table) * group.num_kv_heads, 2, group.block_size, group.k_dim)
    return pages.transpose(0, 1).flatten(1, 2)


def test_pages_hold_what_torch_would_round_to(uneven: Path) -> None:
    (prompt,) = draws(43, 40)
    exact, half, codes = (
        pages_of(native_runner(uneven, with_pages(name)), prompt) for name in ("float32", "bfloat16", "int8")
    )
    assert torch.equal(half.view(torch.int16), exact.to(torch.bfloat16).view(torch.int16))
    most = exact.abs().amax(-1)
    assert (most > 0).sum() == 2 * 2 * len(prompt)
    scale = codes[..., HEAD_DIM:].contiguous().view(torch.float32)[..., 0]
    assert torch.equal(scale, most / 127)
    expected = (exact / torch.where(scale > 0, scale, 1)[..., None]).round().to(torch.int8)
    assert torch.equal(codes[..., :HEAD_DIM], expected)
    assert int(expected.abs().max()) == 127


def test_transformers_attends_to_the_same_pages(uneven: Path) -> None:
    """Whatever is computed together: rounding is much coarser than what the order of sums changes."""
    draw, prompts = random.Random(44), draws(44, 90, 1, 33)
    ours = all_logits(native_runner(uneven, with_pages("bfloat16")), prompts, draw, 48)
    exact = all_logits(native_runner(uneven), prompts, draw, 48)
    plain = transformers_runner(uneven, "bfloat16")
    assert plain.dtype == "float32"
    assert plain.rank.model.dtype == torch.float32
    for most in (1, 48):
        theirs = all_logits(plain, prompts, draw, most)
        for one, other, reference in zip(theirs, ours, exact, strict=True):
            assert (one - other).square().mean() < 0.1 * (reference - other).square().mean()


def test_pages_of_8_bit_floats_hold_what_torch_would_round_to(uneven: Path) -> None:
    (prompt,) = draws(43, 40)
    exact, narrow = (pages_of(transformers_runner(uneven, name), prompt) for name in ("float32", "fp8"))
    assert narrow.dtype is torch.float8_e4m3fn
    assert narrow.view(torch.uint8).equal(exact.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def test_predictions_over_8_bit_floats_are_the_same_in_any_chunk_but_for_the_order_of_sums(uneven: Path) -> None:
    draw, prompts = random.Random(44), draws(44, 90, 1, 33)
    exact = all_logits(transformers_runner(uneven, "float32"), prompts, draw, 48)
    runner = transformers_runner(uneven, "fp8")
    assert runner.rank.model.dtype == torch.float32
    spoil(runner.caches[0])
    alone = [all_logits(runner, [prompt], draw, 48)[0] for prompt in prompts]
    for most in (1, 48):
        for one, other, reference in zip(all_logits(runner, prompts, draw, most), alone, exact, strict=True):
            assert (one - other).square().mean() < 0.1 * (reference - other).square().mean()
            assert (reference - other).abs().max() < 0.5 * reference.abs().max()


def test_pages_wider_than_the_arithmetic_change_nothing(uneven: Path) -> None:
    draw, prompts = random.Random(45), draws(45, 40, 9)
    narrow, wide = (transformers_runner(uneven, kv_dtype, dtype="bfloat16") for kv_dtype in ("auto", "float32"))
    assert [runner.spec.groups[0].dtype for runner in (narrow, wide)] == ["bfloat16", "float32"]
    logits = [all_logits(runner, prompts, random.Random(draw.randrange(1)), 48) for runner in (narrow, wide)]
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [("int8", "int8"), ("bfloat16", "bfloat16"), ("bfloat16", "plain")])
def test_a_sequence_goes_on_after_a_kv_transfer(first: str, second: str, uneven: Path) -> None:
    """Whole blocks arrive as they are; between two native workers the logits are those of one."""
    (prompt,) = draws(46, 60)
    prefill = native_runner(uneven, with_pages(first))
    decode: LogitsRunner = (
        transformers_runner(uneven, first) if second == "plain" else native_runner(uneven, with_pages(second))
    )
    assert prefill.spec.describe() == decode.spec.describe()
    table = [7, 3, 9, 1]
    for runner in (prefill, decode):
        spoil(runner.caches[0])
    for begin, end in ((0, 30), (30, 41)):
        prefill._compute(RankStep([part_of(prompt, begin, end, table)], [0]), ignore_layer)
    decode.caches[0].groups[0][:, table] = prefill.caches[0].groups[0][:, table]
    for at in range(41, 60):
        step = RankStep([part_of(prompt, at, at + 1, table)], [0])
        there, here = (runner._compute(step, ignore_layer).clone() for runner in (decode, prefill))
        if second == "plain":
            torch.testing.assert_close(there, here, rtol=0.02, atol=0.02 * float(here.abs().max()))
        else:
            assert same_bits([there], [here])


@pytest.mark.parametrize("kv_dtype", NARROW)
def test_preemption_and_cached_prefixes_change_no_answer(kv_dtype: str, uneven: Path) -> None:
    prompts = draws(47, 30, 30, 30, 30)
    prompts += [prompt[:16] + more for prompt, more in zip(prompts, draws(48, 4, 20, 30, 1), strict=True)]
    specs = [make_spec(f"{i}", prompt, 40, ignore_eos=True) for i, prompt in enumerate(prompts)]
    roomy, tight = native_engine(uneven, kv_dtype), native_engine(uneven, kv_dtype, num_blocks=10)
    spoil(tight.runner.caches[0])
    expected = [answers(native_engine(uneven, kv_dtype), [spec], steps_between=1)[0][0] for spec in specs]
    assert answers(roomy, specs, steps_between=9)[0] == expected
    assert answers(tight, specs, steps_between=1)[0] == expected
    assert tight.load().preemptions > 0


@pytest.mark.parametrize("kv_dtype", NARROW)
def test_drafts_change_no_answer(kv_dtype: str, uneven: Path) -> None:
    drafted, plain = drafted_and_plain(
        native_engine(uneven, kv_dtype), native_engine(uneven, kv_dtype, speculation="off")
    )
    assert drafted == plain


def test_the_pool_holds_as_many_blocks_as_fit(uneven: Path) -> None:
    size = 0.01
    for kv_dtype, token_bytes in (("float32", 4 * HEAD_DIM), ("bfloat16", 2 * HEAD_DIM), ("int8", HEAD_DIM + 4)):
        runner = native_runner(uneven, with_pages(kv_dtype, num_blocks=0, kv_cache_gib=size))
        block_bytes = 4 * 2 * 2 * 16 * token_bytes  # layers, K and V, heads, tokens
        assert runner.spec.block_bytes == block_bytes
        assert runner.num_blocks == (int(size * GIB / block_bytes),)
        assert runner.caches[0].groups[0].nbytes == runner.num_blocks[0] * block_bytes
        runner.close()


def test_what_is_packed_serves_pages_of_any_type(uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps are compared over float32 pages, so that one file has one digest."""

    shutil.copy2(build.library(cache_dir(load().cluster) / "native", build.variant_of(build.cpu_flags())), tmp_path)

    def started(kv_dtype: str) -> NativeRunner:
        return NativeRunner(ModelConfig(path=str(uneven), device="cpu"), with_pages(kv_dtype), tmp_path)

    started("int8").close()
    (packed,) = tmp_path.glob("*.packed")
    written = packed.stat().st_ino
    monkeypatch.setattr(NativeRunner, "_pack", lambda *_: pytest.fail("the file did not serve"))
    for kv_dtype in ("float32", "bfloat16"):
        runner = started(kv_dtype)
        assert runner.caches[0].groups[0].dtype == getattr(torch, kv_dtype)
        logits = all_logits(runner, draws(49, 30), random.Random(1), 48)
        assert all(bool(row.isfinite().all()) for row in logits)
        runner.close()
    assert packed.stat().st_ino == written


# -- what does not go together -----------------------------------------------------------------------------------------


def test_pages_that_a_runner_does_not_have_are_refused_by_name(uneven: Path) -> None:
    model, cache = ModelConfig(path=str(uneven), device="cpu"), cache_dir(load().cluster)
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype int8 needs the native step"):
        make_runner(model, with_pages("int8", runner="transformers"), cache)
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype is not supported by testing\.arithmetic; unset it"):
        arithmetic_runner(model, with_pages("bfloat16"), TestingConfig(arithmetic=True))
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype int8 needs the native step"):
        make_runner(replace(model, dtype="bfloat16"), with_pages("int8"), cache)
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype is fp8, which the native step does not support"):
        make_runner(model, with_pages("fp8", runner="native"), cache)
    assert make_runner(model, with_pages("fp8"), cache).name == "transformers"


def test_flashinfer_is_refused_by_name_where_there_is_no_gpu(uneven: Path) -> None:
    model, cache = ModelConfig(path=str(uneven), device="cpu"), cache_dir(load().cluster)
    engine = EngineConfig(attention="flashinfer")
    with pytest.raises(ConfigError, match=r"engine\.attention is flashinfer, which the native step does not support"):
        make_runner(model, replace(engine, runner="native"), cache)
    with pytest.raises(ConfigError, match=r"engine\.attention is not supported by testing\.arithmetic; unset it"):
        arithmetic_runner(model, engine, TestingConfig(arithmetic=True))
    with pytest.raises(
        ModelLoadError, match=r"engine\.attention flashinfer is not available: the device is no NVIDIA GPU"
    ):
        make_runner(model, engine, cache)


def test_weights_of_8_bit_floats_are_refused_by_name_where_no_gpu_multiplies_them(uneven: Path) -> None:
    model, cache = ModelConfig(path=str(uneven), device="cpu", weights="fp8"), cache_dir(load().cluster)
    for runner, words in (
        ("auto", "needs an NVIDIA GPU with compute capability 8.9 or more, and this model is on a CPU"),
        ("transformers", "this model is on a CPU; set it to exact"),
        ("native", "model.weights is fp8, which the native step does not support"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            make_runner(model, replace(ENGINE, runner=runner), cache)
    with pytest.raises(ConfigError, match=r"weights fp8 needs transformers on a GPU: testing\.arithmetic is set"):
        arithmetic_runner(model, EngineConfig(), TestingConfig(arithmetic=True))


def test_int8_pages_travel_as_they_are_or_not_at_all(uneven: Path) -> None:
    config = load()
    for kv_dtype in ("int8", "fp8"):
        with pytest.raises(ConfigError, match=rf"wire_dtype is bfloat16, but pages of engine\.kv_dtype {kv_dtype}"):
            replace(config, engine=with_pages(kv_dtype), transfer=TransferConfig(wire_dtype="bfloat16"))
    specs = {name: native_runner(uneven, with_pages(name)).spec for name in ("float32", "bfloat16", "int8")}
    layouts = {name: layout_of(spec) for name, spec in specs.items()}
    assert wire_compat("r", specs["float32"]) == wire_compat("r", specs["bfloat16"]) != wire_compat("r", specs["int8"])
    assert mismatch(layouts["int8"], layouts["int8"], "auto") == ""
    assert mismatch(layouts["float32"], layouts["bfloat16"], "auto") == ""
    assert mismatch(layouts["bfloat16"], layouts["float32"], "float32") == ""
    assert mismatch(layouts["int8"], layouts["float32"], "auto") == (
        "in group 'all', int8 cannot be converted to float32"
    )


@pytest.mark.parametrize("kv_dtype", NARROW)
def test_the_default_models_next_token_is_nearly_as_likely(kv_dtype: str, model_dir: Path) -> None:
    config = EngineConfig(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=96, kv_dtype=kv_dtype)
    draw = random.Random(50)
    prompt = [draw.randrange(3, 49000) for _ in range(200)]
    blocks = list(range(13))
    rows = []
    for name in (kv_dtype, "float32"):
        runner = native_runner(model_dir, replace(config, kv_dtype=name))
        for begin in (0, 96, 192):
            part = part_of(prompt, begin, min(begin + 96, 200), blocks)
            logits = runner._compute(RankStep([part], [0]), ignore_layer)
        rows.append(logits[0].log_softmax(-1))
    kl = float((rows[1].exp() * (rows[1] - rows[0])).sum())
    assert 0 < kl < 0.02
