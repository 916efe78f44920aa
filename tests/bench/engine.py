"""Our engine against transformers' own `generate`: same weights, prompts, dtype and thread count, one process.

Decoding is timed from the moment every stream has its first token, over the same number of steps at full batch;
prefill from the prompt to its first token. The tokens of both sides are compared too: both must do the same work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from baton.config import EngineConfig, ModelConfig, load
from baton.engine.core.engine import Engine
from baton.engine.core.scheduler import SchedulerLimits
from baton.engine.core.sequence import Purpose
from baton.engine.runners import make_runner
from baton.messages import SequenceSpec
from baton.sampling import SamplingParams
from deploy.models import cache_dir, resolve
from router.prompt import Tokenizer
from tests.bench.report import Report, Table
from tests.bench.stats import interleaved, ratio, spread

PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 900
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

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def cpu_ms_per_token(self) -> float:
        return self.cpu_s * 1e3 / self.num_tokens


class Baton:
    """The engine as a worker runs it, without its event loop."""

    def __init__(self, path: Path) -> None:
        config = EngineConfig(num_threads=1, kv_cache_gib=0.5)
        runner = make_runner(
            ModelConfig(path=str(path), dtype="float32", device="cpu"), config, cache_dir(load().cluster)
        )
        limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            output_reservation=config.output_reservation,
        )
        self._engine = Engine(runner, limits)
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
        while any(s.first_token_s == 0 for s in sequences):
            self._step()
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
        return Measured(num_tokens, wall_s, cpu_s, answers)

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

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
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


def run(quick: bool) -> Report:
    path = resolve(ModelConfig(), cache_dir(load().cluster)).path
    num_rounds, num_steps = (2, 12) if quick else (5, 32)
    ids = Tokenizer.load(path).encode(TEXT * 40)
    prompts = [ids[7 * i : 7 * i + PROMPT_TOKENS] for i in range(8)]
    sides: dict[str, Baton | Transformers] = {"baton": Baton(path), "transformers": Transformers(path)}
    cases: dict[str, Callable[[Baton | Transformers], Measured]] = {
        "decode, 1 stream": lambda side: side.decode(prompts[:1], num_steps),
        "decode, 8 streams": lambda side: side.decode(prompts, num_steps),
        f"prefill, {LONG_PROMPT_TOKENS} tokens": lambda side: side.prefill([ids[:LONG_PROMPT_TOKENS]]),
    }
    table = Table(
        f"Engine: SmolLM2-135M, float32, 1 thread, {PROMPT_TOKENS}-token prompts, {num_rounds} rounds",
        ("", "baton tok/s", "generate tok/s", "ratio", "baton CPU ms/tok", "generate CPU ms/tok", "same tokens"),
    )
    for name, case in cases.items():
        for side in sides.values():
            case(side)  # warm up
        found: dict[str, list[Measured]] = {side_name: [] for side_name in sides}
        for side_name in interleaved(tuple(sides), num_rounds):
            found[side_name].append(case(sides[side_name]))
        ours, theirs = found["baton"], found["transformers"]
        rates = [[m.tokens_per_s for m in side] for side in (ours, theirs)]
        num_same = sum(a == b for a, b in zip(ours[0].answers, theirs[0].answers, strict=True))
        table.rows.append(
            (
                name,
                *(spread(values) for values in rates),
                ratio(*rates),
                *(spread([m.cpu_ms_per_token for m in side]) for side in (ours, theirs)),
                f"{num_same} of {len(ours[0].answers)}",
            )
        )
    return Report("engine", [table])
