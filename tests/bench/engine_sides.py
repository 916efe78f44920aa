"""What `engine` compares within one process: our engine, by either of its runners, and transformers' `generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from baton.config import EngineConfig, ModelConfig, load
from baton.messages import SequenceSpec
from baton.sampling import SamplingParams
from deploy.models import cache_dir
from engine.core.engine import Engine
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.runners import make_runner

PROMPT_TOKENS = 128
TEXT = (
    "The keeper of the lighthouse wrote down the wind, the height of the water and the names of the ships that passed. "
    "On quiet days he repaired the lamp, on loud ones he counted the seconds between lightning and thunder. "
)

GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run; `cpu_s` is of the whole process, which has one compute thread."""

    num_tokens: int
    wall_s: float
    cpu_s: float
    answers: tuple[tuple[int, ...], ...]
    chunks_s: tuple[float, ...] = ()
    """Wall time of each step up to the first tokens; of our engine alone."""
    began_s: float = 0.0
    """When the time that is measured began, on a clock that all processes of a machine share; of our engine alone."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def cpu_ms_per_token(self) -> float:
        return self.cpu_s * 1e3 / self.num_tokens


class Side(Protocol):
    """One of those that are compared. All answer greedily and have one compute thread."""

    precision: str

    def prefill(self, prompts: list[list[int]]) -> Measured:
        """Computes prompts that no cache has, timed to their first tokens."""
        ...

    def decode(self, prompts: list[list[int]], num_steps: int) -> Measured:
        """Answers all prompts at once, timed from the moment when each has its first token, over `num_steps` more."""
        ...


class Baton:
    """The engine as a worker runs it, without its event loop.

    Args:
        runner: as `engine.runner` names it.
        weights: as `model.weights` names them.
        kv_dtype: as `engine.kv_dtype` names it.
    """

    def __init__(
        self, path: Path, runner: str = "auto", weights: str = "exact", kv_dtype: str = "auto", num_threads: int = 1
    ) -> None:
        kept = "" if kv_dtype == "auto" else f", KV {kv_dtype}"
        self.precision = f"{'float32' if weights == 'exact' else weights}{kept}"
        config = EngineConfig(runner=runner, num_threads=num_threads, kv_cache_gib=0.5, kv_dtype=kv_dtype)
        model = ModelConfig(path=str(path), dtype="float32", device="cpu", weights=weights)
        self.runner = make_runner(model, config, cache_dir(load().cluster))
        limits = SchedulerLimits(
            max_num_seqs=config.batch(on_gpu=False).max_num_seqs,
            max_num_batched_tokens=config.batch(on_gpu=False).max_num_batched_tokens,
            output_reservation=config.output_reservation,
        )
        self._engine = Engine(self.runner, limits)
        self._num_runs = 0

    def prefill(self, prompts: list[list[int]]) -> Measured:
        return self._run(prompts, 0)

    def decode(
        self, prompts: list[list[int]], num_steps: int, samplings: Sequence[SamplingParams] = (GREEDY,)
    ) -> Measured:
        """Args:
        samplings: of the prompts, in turn.
        """
        return self._run(prompts, num_steps, samplings)

    def _run(
        self, prompts: list[list[int]], num_steps: int, samplings: Sequence[SamplingParams] = (GREEDY,)
    ) -> Measured:
        self._num_runs += 1
        specs = [
            self._spec(index, prompt, replace(samplings[index % len(samplings)], max_tokens=num_steps + 64))
            for index, prompt in enumerate(prompts)
        ]
        start = _clocks()
        sequences = [self._engine.add(spec, Purpose.GENERATE, time.monotonic()) for spec in specs]
        begins_s = [start[0]]
        while any(s.first_token_s == 0 for s in sequences):
            self._step()
            begins_s.append(time.perf_counter())
        num_tokens = sum(len(prompt) for prompt in prompts)
        num_streams = sum(spec.sampling.num_beams for spec in specs)
        if num_steps:
            start, num_tokens = _clocks(), num_steps * num_streams
            for _ in range(num_steps):
                assert self._step() == num_streams, "not at full batch"
        wall_s, cpu_s = (now - then for now, then in zip(_clocks(), start, strict=True))
        answers = tuple(tuple(s.token_ids[s.spec.num_prompt_tokens :][: num_steps + 1]) for s in sequences)
        for sequence in sequences:
            self._engine.end(sequence)
        self._engine.take_block_events()
        chunks_s = tuple(b - a for a, b in pairwise(begins_s))
        return Measured(num_tokens, wall_s, cpu_s, answers, chunks_s, start[0])

    def _step(self) -> int:
        batch, _ = self._engine.schedule(time.monotonic())
        self._engine.commit(batch, self._engine.runner.execute(batch), time.monotonic())
        return len(batch.parts)

    def _spec(self, index: int, prompt: list[int], sampling: SamplingParams) -> SequenceSpec:
        return SequenceSpec(
            request_id=f"{self._num_runs}",
            choice_index=index,
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            cache_seed=f"{self._num_runs}".encode(),
        )


class Transformers:
    """`generate` over its own cache, greedy, prompts of equal length in one batch."""

    precision = "float32"

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def prefill(self, prompts: list[list[int]]) -> Measured:
        start = _clocks()
        stamps, answers = self._generate(prompts, 1)
        wall_s, cpu_s = (now - then for now, then in zip(stamps[0], start, strict=True))
        return Measured(sum(len(prompt) for prompt in prompts), wall_s, cpu_s, answers)

    def decode(self, prompts: list[list[int]], num_steps: int) -> Measured:
        stamps, answers = self._generate(prompts, num_steps + 1)
        wall_s, cpu_s = (now - then for now, then in zip(stamps[-1], stamps[0], strict=True))
        return Measured(num_steps * len(prompts), wall_s, cpu_s, answers)

    def _generate(
        self, prompts: list[list[int]], num_tokens: int
    ) -> tuple[list[tuple[float, float]], tuple[tuple[int, ...], ...]]:
        stamps = _Stamps()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([stamps]),
            )
        return stamps.taken, tuple(tuple(row) for row in output[:, ids.shape[1] :].tolist())


class _Stamps(StoppingCriteria):  # type: ignore[misc]
    """Never stops; notes when each token was there."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.taken.append(_clocks())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
