"""The engine on a GPU, against transformers' own `generate` there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton.config import EngineConfig, ModelConfig
from baton.messages import SequenceSpec
from engine.core.engine import Engine
from engine.core.ngrams import Guess, NgramIndex
from engine.core.outputs import Generated
from engine.core.runner import Fence, StepOutput
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.model.transformers_runner import TransformersRunner
from tests.integration.test_engine_models import load_reference, refer, same_up_to_near_ties
from tests.support.builders import sequence_spec
from tests.support.guessing import FREE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]


def make_spec(name: str, prompt: list[int]) -> SequenceSpec:
    return sequence_spec(prompt, name, max_tokens=16)


class Sevens(NgramIndex):
    """Guesses the same token as often as it may, up to 12 times and less often by turns."""

    def read(self, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        return True

    def guess(self, token_ids: Sequence[int], most: int) -> Guess:
        number = min(most, len(token_ids) % 13)
        return Guess((7,) * number, tuple(0.9**place for place in range(1, number + 1)))


def test_tokens_equal_generate_in_float32_with_drafts(model_dir: Path) -> None:
    """Prompts of any length, some of which repeat themselves, as the answers to them do; each likely guess is taken."""
    config = EngineConfig(num_blocks=1024)
    runner = TransformersRunner(ModelConfig(path=str(model_dir), dtype="float32", device="cuda"), config)
    engine = Engine(
        runner,
        SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=512, output_reservation=512, max_draft_tokens=12),
    )
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    reference = load_reference(model_dir).cuda()
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 2
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 49000, (n,), generator=generator).tolist() for n in (1, 16, 17, 100, 700, 2000)]
    prompts += [(prompts[3][:length] * 5)[: 5 * length - 7] for length in (20, 33, 60)]
    for index, prompt in enumerate(prompts):
        engine.add(make_spec(str(index), prompt), Purpose.GENERATE, now=0.0)
    answers: dict[str, list[int]] = {}
    while batch := engine.schedule(0.0)[0]:
        names = {part.sequence_key: engine.sequences[part.sequence_key].spec.request_id for part in batch.parts}
        for output in engine.commit(batch, runner.execute(batch), 0.0):
            assert isinstance(output, Generated)
            answers.setdefault(names[output.sequence_key], []).extend(output.token_ids)
        engine.check()
    references = [refer(reference, prompt, 16) for prompt in prompts]
    got = [answers[str(index)] for index in range(len(prompts))]
    load = engine.load()
    print(f"{load.accepted_tokens} of {load.drafted_tokens} drafts accepted")
    assert load.accepted_tokens >= 12
    num_same = sum(map(same_up_to_near_ties, got, references))
    print(f"{num_same} of {len(prompts)} answers equal to the last token")
    assert num_same >= len(prompts) - 1, "too many near ties for a test that means something"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_step_writes_all_scores_out_or_waits_for_a_plan(dtype: str, model_dir: Path) -> None:
    """Whole prompts, further chunks, decode batches with drafts: all by the kernels that take any shape as it comes."""
    config = EngineConfig(num_blocks=1024)
    runner = TransformersRunner(ModelConfig(path=str(model_dir), dtype=dtype, device="cuda"), config)
    limits = SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=1024, output_reservation=64, max_draft_tokens=12)
    engine = Engine(runner, limits)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    for length in (3, 700, 3000):
        sequence = engine.add(make_spec(str(length), [7] * length), Purpose.GENERATE, now=0.0)
        sequence.ngrams = Sevens(1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    num_steps = num_drafted = 0
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        while batch := engine.schedule(0.0)[0]:
            engine.commit(batch, runner.execute(batch), 0.0)
            num_steps += 1
            num_drafted += any(part.num_drafts for part in batch.parts)
    assert num_steps > 4
    assert num_drafted > 1
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{dtype}: {peak / 2**20:.0f} MiB at most beside weights and pool")
    scores_bytes = 9 * 1024 * 3000 * 4  # of one layer of the model, for the last chunk
    logits_bytes = 3 * 13 * 49152 * 4
    assert peak < scores_bytes + logits_bytes


def test_a_reader_that_waits_for_a_layers_fence_reads_the_final_rows(model_dir: Path) -> None:
    """On a stream of its own, while the step goes on; bit for bit. After the step nobody needs a fence."""
    config = EngineConfig(num_blocks=1024)
    runner = TransformersRunner(ModelConfig(path=str(model_dir), device="cuda"), config)
    engine = Engine(
        runner,
        SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=4096, output_reservation=512),
    )
    prompt = torch.randint(3, 49000, (3000,), generator=torch.Generator().manual_seed(1)).tolist()
    sequence = engine.add(make_spec("read", prompt), Purpose.PREFILL, now=0.0)
    reader = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    (group,) = runner.cache.groups
    group.fill_(float("nan"))
    torch.cuda.synchronize()
    batch, _ = engine.schedule(0.0)
    full = torch.tensor(sequence.block_ids[0][:-1], device="cuda")
    copies: list[torch.Tensor] = []

    def layer_done(layer: int, fence: Fence | None) -> None:
        assert layer == len(copies)
        assert fence is not None
        with torch.cuda.stream(reader):
            fence.wait(reader)
            copies.append(group[layer, full])

    sampled = runner.execute(batch, layer_done)
    after_step = group[:, full].clone()
    torch.cuda.synchronize()
    assert len(copies) == len(group)
    for copy, final in zip(copies, after_step, strict=True):
        assert copy.equal(final)
        assert copy.isfinite().all()
    engine.commit(batch, sampled, 0.0)
    engine.check()


def test_a_step_without_a_token_to_sample_is_over_when_execute_returns(model_dir: Path) -> None:
    runner = TransformersRunner(ModelConfig(path=str(model_dir), device="cuda"), EngineConfig(num_blocks=1024))
    engine = Engine(
        runner,
        SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=2048, output_reservation=512),
    )
    engine.add(make_spec("chunked", [7] * 3000), Purpose.PREFILL, now=0.0)
    batch, _ = engine.schedule(0.0)
    assert runner.execute(batch) == StepOutput(sampled_token_ids=((),), num_computed_tokens=(2048,))
    assert torch.cuda.current_stream().query()
