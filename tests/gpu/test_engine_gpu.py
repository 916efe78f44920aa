"""The engine on a GPU, against transformers' own `generate` there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.config import EngineConfig, ModelConfig
from baton.engine.engine import Engine, Generated
from baton.engine.scheduler import SchedulerLimits
from baton.engine.sequence import Purpose
from baton.engine.transformers_runner import TransformersRunner
from baton.messages import SequenceSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]


def test_tokens_equal_generate_in_float32(model_dir: Path) -> None:
    config = EngineConfig(num_blocks=1024)
    runner = TransformersRunner(ModelConfig(path=str(model_dir), dtype="float32", device="cuda"), config)
    engine = Engine(runner, SchedulerLimits(16, 64, 512, 512, 0))
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).cuda().eval()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 49000, (n,), generator=generator).tolist() for n in (1, 16, 17, 100, 700, 2000)]
    for index, prompt in enumerate(prompts):
        spec = SequenceSpec(
            str(index), 0, tuple(prompt), len(prompt), 16, 0.0, 0, 1.0, 0.0, 0, (), ignore_eos=True, cache_seed=b"s"
        )  # fmt: skip
        engine.add(spec, Purpose.GENERATE, now=0.0)
    answers: dict[str, list[int]] = {}
    while batch := engine.schedule(0.0)[0]:
        for output in engine.commit(batch, runner.execute(batch), 0.0):
            assert isinstance(output, Generated)
            answers.setdefault(output.sequence.spec.request_id, []).append(output.token_id)
        engine.check()
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device="cuda")
        out = reference.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=2)
        assert answers[str(index)] == out[0, len(prompt) :].tolist()
