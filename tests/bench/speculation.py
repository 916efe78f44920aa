"""The engine with drafts against itself without: on texts that repeat their prompt, and on texts that do not.

How much checking a draft costs depends on how the weights are held: as the codes that the model's file had, or in
float32, to which end they are moved by less than a part in four thousand each.

Then the drafts of a draft model, beside look-up, against look-up alone. There is none in the catalogue that is smaller
than the default model, so two stand for what there may be: its first layers alone, which hardly ever guess right, and
the model itself on the native step beside a target on transformers, which is always right at a fraction of the cost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from baton.config import EngineConfig, ModelConfig, load
from baton.messages import SequenceSpec
from baton.sampling import SamplingParams
from deploy.models import cache_dir, resolve
from engine.core.draft_runner import DraftedRunner
from engine.core.engine import Engine
from engine.core.runner import Runner
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose
from engine.native.runner import NativeRunner
from engine.runners import make_runner
from router.prompt import Tokenizer
from tests.bench.engine_sides import TEXT
from tests.bench.report import Cell, Report, Table
from tests.bench.stats import NUM_TRIES, describe_load, ratio, spread, until_quiet, verdict

PASSAGE = (
    f"{TEXT}In the third winter a schooner from the north ran aground on the sandbank, and he rowed out twice, "
    "the first time for the crew and the second time for the mail. Nobody thanked him for the mail, but he kept a "
    "letter from it in his drawer for the rest of his life."
)
"""As long as an answer, which ends where the model ends it: what it would go on with is no copy."""
COPYING = (f"Repeat the following text exactly, word for word:\n\n{PASSAGE}",)
FREE = (
    "Write a short story about a fox who learns to swim.", "Explain how a bicycle stays upright.",
    "Describe the city of Lisbon to a traveller.", "Why is the sky blue? Explain it to a child.",
    "Give advice to somebody who begins a new job.", "Tell me about the history of tea.",
    "How do vaccines work?", "Write about the difference between wolves and dogs.",
)  # fmt: skip
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
LOOK_UP_PARTS = ("codes", "float32", "transformers")
"""How the weights are held natively, and the transformers runner."""
MODEL_PARTS = ("first_layers", "itself")
"""What is the draft model."""
PARTS = (*LOOK_UP_PARTS, *MODEL_PARTS)
SLOW_PARTS = ("transformers", "itself")
"""Those of which 16 streams take a quarter of an hour."""
NUM_LAYERS = 10
"""The layers that a cut copy of the default model, which has 30, begins with."""
COPYING_GATES = {"codes": 1.4, "float32": 2.0}
"""The least ratio at one stream: part -> gate."""
FREE_GATE = 0.98
NUM_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    texts: tuple[str, ...]
    num_streams: int
    temperature: float = 0.0

    @property
    def sampling(self) -> SamplingParams:
        """How every stream is drawn, but for its seed. Free text has as many tokens in every round."""
        is_free, num_tokens = self.texts is FREE, 128 if self.num_streams == 1 else 64
        most = num_tokens if is_free else 128
        return SamplingParams(temperature=self.temperature, ignore_eos=is_free, max_tokens=most)

    def gate(self, part: str) -> float | None:
        if self.texts is FREE or part in MODEL_PARTS:
            return FREE_GATE
        return COPYING_GATES.get(part) if self.num_streams == 1 else None


CASES = (
    _Case("copying", COPYING, 1),
    _Case("copying", COPYING, 16),
    _Case("free", FREE, 1),
    _Case("free, temperature 1", FREE, 1, 1.0),
    _Case("free", FREE, 16),
    _Case("free, temperature 1", FREE, 16, 1.0),
)
MOVED = 2.0**-12
"""The largest share of itself by which a weight is moved, so that no smaller form gives it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    cpu_s: float
    num_steps: int
    num_drafted: int
    num_accepted: int
    answers: tuple[tuple[int, ...], ...]


class _Arm:
    """An engine that learns what its steps cost, in CPU time."""

    def __init__(self, runner: Runner, max_draft_tokens: int) -> None:
        config = EngineConfig()
        limits = SchedulerLimits(
            max_num_seqs=config.batch(on_gpu=False).max_num_seqs,
            max_num_batched_tokens=config.batch(on_gpu=False).max_num_batched_tokens,
            output_reservation=config.output_reservation,
            max_draft_tokens=max_draft_tokens,
        )
        self._engine = Engine(runner, limits)
        self._num_runs = 0

    def begin(self, prompts: list[list[int]], sampling: SamplingParams) -> None:
        """Asks all prompts, and goes on until each has its first token."""
        self._num_runs += 1
        self._before, self._cpu_s, self._num_steps = self._engine.load(), 0.0, 0
        self._sequences = [
            self._engine.add(self._spec(place, prompt, sampling), Purpose.GENERATE, time.monotonic())
            for place, prompt in enumerate(prompts)
        ]
        while not all(sequence.first_token_s for sequence in self._sequences):
            self._step()

    def go_on(self) -> bool:
        """Makes a step, and times it. Returns whether there was one left to make."""
        if not self._engine.sequences:
            return False
        began_s = time.process_time()
        self._step()
        self._cpu_s += time.process_time() - began_s
        self._num_steps += 1
        return True

    def measured(self) -> _Measured:
        """Returns what all steps since the first tokens took and gave."""
        before, after = self._before, self._engine.load()
        self._engine.take_block_events()
        return _Measured(
            cpu_s=self._cpu_s,
            num_steps=self._num_steps,
            num_drafted=after.drafted_tokens - before.drafted_tokens,
            num_accepted=after.accepted_tokens - before.accepted_tokens,
            answers=tuple(tuple(sequence.token_ids) for sequence in self._sequences),
        )

    def _step(self) -> None:
        step, _ = self._engine.schedule(time.monotonic())
        began_s = time.process_time()
        output = self._engine.runner.execute(step)
        took_s = time.process_time() - began_s
        self._engine.commit(step, output, time.monotonic())
        self._engine.learn(step.size(), took_s, output.proposing_s)

    def _spec(self, place: int, prompt: list[int], sampling: SamplingParams) -> SequenceSpec:
        return SequenceSpec(
            request_id=f"{self._num_runs}",
            choice_index=place,
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            sampling=replace(sampling, seed=place),
            cache_seed=f"{self._num_runs}".encode(),
        )


def _race(arms: Mapping[str, _Arm], prompts: list[list[int]], sampling: SamplingParams) -> dict[str, _Measured]:
    """Lets all arms answer the prompts, a step of each in turn, since machines change their speed within seconds."""
    running = list(arms.values())
    for arm in running:
        arm.begin(prompts, sampling)
    while running:
        running = [arm for arm in running if arm.go_on()]
    return {name: arm.measured() for name, arm in arms.items()}


def run(quick: bool, parts: Collection[str] = PARTS) -> Report:
    cache = cache_dir(load().cluster)
    path = Path(resolve(ModelConfig(), cache).path)
    return Report("speculation", [_table(path, cache, part, quick) for part in PARTS if part in parts])


def _table(path: Path, cache: Path, part: str, quick: bool) -> Table:
    with contextlib.ExitStack() as running:
        name, pairs = _arms(path, cache, part, running)
        table = Table(
            f"Speculation: SmolLM2-135M, {name}, 1 thread, {2 if quick else NUM_ROUNDS} rounds",
            ("", "streams", "plain CPU ms/tok", "drafts CPU ms/tok", "ratio", "gate", "kept", "steps", "accepted",
             "same tokens", "other work, cores"),
        )  # fmt: skip
        tokenizer = Tokenizer.load(path)
        for case in CASES:
            if case.num_streams == 1 or part not in SLOW_PARTS:
                table.rows.append(_row(case, tokenizer, pairs, case.gate(part), quick))
    return table


def _arms(path: Path, cache: Path, part: str, running: contextlib.ExitStack) -> tuple[str, list[dict[str, _Arm]]]:
    """Returns what is compared, and its name: twice, on two runners that are alike, and the other way round.

    So it does not count which of them has the luckier memory. The runners are closed with `running`.
    """

    def started(folder: Path, name: str) -> Runner:
        config = EngineConfig(num_threads=1, kv_cache_gib=0.5, runner=name)
        runner = make_runner(ModelConfig(path=str(folder), dtype="float32", device="cpu"), config, cache)
        running.callback(runner.close)
        return runner

    most = EngineConfig().max_draft_tokens
    folder = _moved(path, cache / "bench_float32" / path.name) if part == "float32" else path
    targets = [started(folder, "transformers" if part in SLOW_PARTS else "auto") for _ in range(2)]
    target = targets[0]
    if part in MODEL_PARTS:
        is_itself = part == "itself"
        smaller = path if is_itself else _first_layers(path, cache / "bench_first_layers" / path.name)
        draft = started(smaller, "native")
        model = "itself, native" if is_itself else f"its first {NUM_LAYERS} layers, native"
        return f"{target.name}, drafts of {model}", [
            {"plain": _Arm(plain, most), "drafts": _Arm(DraftedRunner(other, draft, time.process_time), most)}
            for plain, other in (targets, targets[::-1])
        ]
    held = f", weights in {target._model.describe_memory()}" if isinstance(target, NativeRunner) else ""
    return f"{target.name}{held}", [
        {"plain": _Arm(plain, 0), "drafts": _Arm(other, most)} for plain, other in (targets, targets[::-1])
    ]


def _row(
    case: _Case, tokenizer: Tokenizer, pairs: Sequence[Mapping[str, _Arm]], gate: float | None, quick: bool
) -> tuple[Cell, ...]:
    """Measures a case, again while others are busy; the quietest try counts."""
    num_rounds = 2 if quick else NUM_ROUNDS
    sampling = replace(case.sampling, max_tokens=32) if quick else case.sampling
    prompts = [_prompt(tokenizer, case.texts[place % len(case.texts)]) for place in range(case.num_streams)]
    for arms in pairs:
        _race(arms, prompts, sampling)  # warm up
    tries: list[tuple[float, dict[str, list[_Measured]]]] = []
    for others in until_quiet(1 if quick else NUM_TRIES):
        found: dict[str, list[_Measured]] = {name: [] for name in pairs[0]}
        with others:
            for arms in itertools.islice(itertools.cycle(pairs), num_rounds):
                for name, measured in _race(arms, prompts, sampling).items():
                    found[name].append(measured)
        tries.append((others.cores, found))
    cores, found = min(tries, key=itemgetter(0))
    plain, drafts = found["plain"], found["drafts"]
    last, number = drafts[-1], sum(map(len, plain[-1].answers)) - sum(map(len, prompts))
    same = sum(a.answers == b.answers for a, b in zip(plain, drafts, strict=True))
    times = ratio([each.cpu_s for each in plain], [each.cpu_s for each in drafts])
    return (
        case.name,
        str(case.num_streams),
        spread([each.cpu_s * 1e3 / number for each in plain]),
        spread([each.cpu_s * 1e3 / number for each in drafts]),
        times,
        f">= {gate}" if gate else "",
        verdict(times.median >= gate and same == num_rounds, cores) if gate else "",
        f"{last.num_steps} of {plain[-1].num_steps}",
        f"{last.num_accepted} of {last.num_drafted}",
        f"{same} of {num_rounds}",
        describe_load(cores, len(tries)),
    )


def _moved(model: Path, folder: Path) -> Path:
    """Returns a copy of a model whose matrices must be held in float32. The copy is made once.

    Args:
        model: a folder with one file of weights.
        folder: where the copy is, or will be.
    """

    def move(part: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = load_file(part / "model.safetensors")
        for weight in weights.values():
            if weight.ndim == 2:
                weight *= 1 + MOVED * (2 * torch.rand(weight.shape, generator=generator) - 1)
        save_file(weights, part / "model.safetensors", {"format": "pt"})

    return _changed(model, folder, move)


def _first_layers(model: Path, folder: Path) -> Path:
    """Returns a copy of a model that has its first layers alone. The copy is made once; see `_moved`."""

    def cut(part: Path) -> None:
        config = json.loads((part / "config.json").read_text())
        (part / "config.json").write_text(json.dumps(config | {"num_hidden_layers": NUM_LAYERS}))
        kept = {}
        for name, weight in load_file(part / "model.safetensors").items():
            layer = name.partition("layers.")[2].partition(".")[0]
            if not layer or int(layer) < NUM_LAYERS:
                kept[name] = weight
        save_file(kept, part / "model.safetensors", {"format": "pt"})

    return _changed(model, folder, cut)


def _changed(model: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    if (folder / "model.safetensors").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(model, part)
    change(part)
    part.rename(folder)
    return folder


def _prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    asked = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(asked, parse_special=True)
