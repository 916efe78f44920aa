"""A model that denoises canvases answers as `generate` with the same noise."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.errors import ConfigError, InvalidRequest, ModelLoadError
from baton.messages import SequenceSpec
from baton.structure import StructuredOutputs
from engine.core.engine import Engine
from engine.core.faults import Fault
from engine.core.outputs import Generated, Output
from engine.core.runner import StepInput
from engine.core.sequence import Purpose, Sequence, Status
from engine.model.canvas import Canvas, Schedule
from engine.model.pages import Pages
from engine.runners import make_runner
from tests.integration.test_engine_models import answers, engine_of, tokens_of
from tests.support.builders import sequence_spec
from tests.support.diffusion import GENERATION, LENGTH, VOCAB_SIZE, generated, load_reference, save_tiny

pytestmark = [pytest.mark.first, pytest.mark.integration]
SEED = 5
ENGINE = EngineConfig(num_blocks=96, max_num_batched_tokens=96, max_num_seqs=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_reference(folder)


@cache
def prompts() -> list[list[int]]:
    """One token, more and less than a canvas, several chunks, longer than the window."""
    draw = random.Random(7)
    return [[draw.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 16, 130, 61)]


def make_engine(folder: Path, config: EngineConfig = ENGINE) -> Engine:
    return engine_of(make_runner(ModelConfig(path=str(folder), device="cpu"), config, folder / "cache"), config)


def spec_of(name: str, prompt: list[int], num_tokens: int, **values: Any) -> SequenceSpec:
    return sequence_spec(prompt, name, max_tokens=num_tokens, **({"temperature": 1.0, "seed": SEED} | values))


def require_same(got: list[list[int]], expected: list[list[int]]) -> None:
    """Answers are equal, but for one where rounding may have changed a draw: from there on all is different."""
    same = [one == other for one, other in zip(got, expected, strict=True)]
    print(f"{sum(same)} of {len(same)} answers equal to the last token")
    assert [len(one) for one in got] == [len(other) for other in expected]
    assert sum(same) >= len(same) - 1


def test_a_tiny_model_answers_as_generate_with_the_same_noise(folder: Path, model: Any) -> None:
    """In mixed batches, over pages that were full of something else, and again from the prefix cache."""
    engine = make_engine(folder)
    for group in engine.runner.caches[0].groups:
        group.fill_(float("nan"))
    found = [generated(model, prompt, 40, SEED) for prompt in prompts()]
    num_most = 3 * GENERATION["max_denoising_steps"]
    assert min(num_steps for _, num_steps in found) < num_most, "a canvas is to end before its last step"
    expected = [tokens for tokens, _ in found]
    got, _ = answers(engine, [spec_of(f"{i}", prompt, 40) for i, prompt in enumerate(prompts())], steps_between=2)
    require_same(got, expected)
    assert len({token for one in got for token in one}) > 60
    again = [prompt + tokens[:32] for prompt, tokens in zip(prompts(), expected, strict=True)]
    specs = [spec_of(f"again-{i}", known, 8, num_prompt_tokens=len(prompts()[i])) for i, known in enumerate(again)]
    specs = [replace(spec, sampling=replace(spec.sampling, max_tokens=40)) for spec in specs]
    got, sequences = answers(engine, specs, steps_between=0)
    require_same(got, [tokens[32:] for tokens in expected])
    assert sequences[3].num_cached_tokens >= 128


@pytest.mark.parametrize(("temperature", "is_drawn"), [(0.0, False), (0.5, True)])
def test_the_temperature_scales_that_of_the_model_and_0_draws_nothing(
    temperature: float, is_drawn: bool, folder: Path, model: Any
) -> None:
    seed = SEED if is_drawn else 0
    expected = [
        generated(model, prompt, 16, seed, is_drawn=is_drawn, temperature=temperature or 1.0)[0] for prompt in prompts()
    ]
    specs = [spec_of(f"{i}", prompt, 16, temperature=temperature) for i, prompt in enumerate(prompts())]
    got, _ = answers(make_engine(folder), specs, steps_between=1)
    require_same(got, expected)


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-300])
def test_a_tiny_temperature_is_within_the_range_of_the_logits(temperature: float, folder: Path) -> None:
    """The drawn tokens are the likeliest ones, as they are at a temperature that is low enough."""
    specs = [spec_of(f"{t}", prompts()[1], 16, temperature=t) for t in (1e-3, temperature)]
    (expected, got), _ = answers(_engine_to_ask(folder), specs, steps_between=0)
    assert got == expected


def test_a_low_temperature_is_within_the_range_of_float16(folder: Path) -> None:
    runner = make_runner(ModelConfig(path=str(folder), device="cpu", dtype="float16"), ENGINE, folder / "cache")
    specs = [spec_of(f"{t}", prompts()[1], 16, temperature=t) for t in (1e-2, 1e-4)]
    for tokens in answers(engine_of(runner, ENGINE), specs, steps_between=0)[0]:
        assert len(set(tokens)) > 4, "NaN makes all tokens 0"


def test_choices_of_one_prompt_share_its_blocks(folder: Path) -> None:
    """One is forked from another in the midst of that one's canvas, whose last token counts as not computed."""
    spec, num_prompt_tokens = spec_of("r", prompts()[3], 40), len(prompts()[3])
    choices = [replace(spec, choice_index=index) for index in range(2)]
    alone = [answers(make_engine(folder), [choice], steps_between=0)[1][0] for choice in choices]
    together = answers(make_engine(folder), choices, steps_between=4)[1]
    assert together[1].num_cached_tokens == num_prompt_tokens - 1
    got, expected = ([each.token_ids[num_prompt_tokens:] for each in sequences] for sequences in (together, alone))
    assert len(got[1]) == 40
    require_same(got, expected)


def test_seeds_and_choices_have_canvases_of_their_own(folder: Path) -> None:
    prompt = prompts()[1]
    asked: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2},
        {"seed": 1, "choice_index": 1},
        {"seed": 1, "request_id": "again"},
    ]
    specs = [spec_of(values.pop("request_id", f"{i}"), prompt, 16, **values) for i, values in enumerate(asked)]
    (first, second, third, again), _ = answers(make_engine(folder), specs, steps_between=0)
    assert first == again
    assert first not in (second, third)


def test_a_canvas_that_was_lost_is_made_again(folder: Path, model: Any) -> None:
    """Blocks are so few that sequences are preempted in the midst of a canvas."""
    tight = make_engine(folder, replace(ENGINE, num_blocks=13))
    chosen = (0, 1, 2, 4)
    specs = [spec_of(f"tight-{i}", prompts()[i], 64) for i in chosen]
    got, _ = answers(tight, specs, steps_between=5)
    assert tight.load().preemptions > 0
    require_same(got, [generated(model, prompts()[i], 64, SEED)[0] for i in chosen])


def test_an_answer_ends_within_a_canvas(folder: Path, model: Any) -> None:
    expected = generated(model, prompts()[1], 40, SEED)[0]
    stop = next(token for place, token in enumerate(expected) if place > 18 and token not in expected[:place])
    specs = [
        spec_of("stopped", prompts()[1], 40, stop_token_ids=(stop,)),
        spec_of("cut", prompts()[1], 21),
    ]
    (stopped, cut), _ = answers(make_engine(folder), specs, steps_between=0)
    assert stopped == expected[: expected.index(stop) + 1]
    assert cut == expected[:21]


def test_a_prefill_worker_computes_the_prompt_and_no_canvas(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV is moved by hand, and the receiver starts with other content in the rest of its blocks."""
    sender, receiver = make_engine(folder), make_engine(folder)
    for group in receiver.runner.caches[0].groups:
        group.fill_(float("nan"))
    specs = [spec_of(f"{number}", prompts()[number], 40) for number in (1, 2, 4)]
    with monkeypatch.context() as patch:
        patch.setattr(Canvas, "denoised", None)
        sent = [computed(sender, spec) for spec in specs]
    targets = [receiver.add(spec, Purpose.RECEIVE, 0.0) for spec in specs]
    receiver.schedule(0.0)
    received = {target.key: list[int]() for target in targets}
    for spec, source, target in zip(specs, sent, targets, strict=True):
        for group, layers in enumerate(sender.runner.spec.groups):
            blocks = slice(layers.first_block(spec.num_prompt_tokens), -(-spec.num_prompt_tokens // 16))
            pages = [each.runner.caches[0].groups[group] for each in (sender, receiver)]
            pages[1][:, list(target.block_ids[group][blocks])] = pages[0][:, list(source.block_ids[group][blocks])]
        assert receiver.insert(target, None, 0.0) is None
    while receiver.load().running:
        step, _ = receiver.schedule(0.0)
        for each in receiver.commit(step, receiver.runner.execute(step), 0.0):
            assert isinstance(each, Generated)
            received[each.sequence_key] += each.token_ids
    require_same(list(received.values()), [generated(model, list(spec.token_ids), 40, SEED)[0] for spec in specs])
    for source in sent:
        sender.end(source)
    sender.check()
    receiver.check()


def computed(engine: Engine, spec: SequenceSpec) -> Sequence:
    """Returns a sequence whose prompt a prefill worker has computed."""
    sequence = engine.add(spec, Purpose.PREFILL, 0.0)
    outputs = list[Output]()
    while not any(isinstance(output, Generated) for output in outputs):
        step, _ = engine.schedule(0.0)
        outputs = engine.commit(step, engine.runner.execute(step), 0.0)
    (output,) = outputs
    assert isinstance(output, Generated)
    assert (output.token_ids, output.finish_reason, sequence.status) == ((), None, Status.HELD)
    assert output.report is not None
    return sequence


def test_a_step_that_is_computed_again_takes_each_canvas_one_step_further(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two canvases is denoised when the second one runs out of memory."""
    denoised, num_calls = Canvas.denoised, 0

    def failing(self: Canvas, *given: Any) -> Canvas:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 7 == 2:
            raise torch.OutOfMemoryError("injected")
        return denoised(self, *given)

    monkeypatch.setattr(Canvas, "denoised", failing)
    monkeypatch.setattr("engine.model.logits_runner.fault_of", lambda error: Fault.OUT_OF_MEMORY)
    chosen = (0, 1, 2)
    got, _ = answers(make_engine(folder), [spec_of(f"{i}", prompts()[i], 32) for i in chosen], steps_between=0)
    assert num_calls > 40
    require_same(got, [generated(model, prompts()[i], 32, SEED)[0] for i in chosen])


def test_steps_have_room_for_the_canvases_of_all_sequences(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No canvas is begun that the next step has no room for: it would be lost."""
    begun, denoised = list[int](), Canvas.denoised

    def noting(self: Canvas, logits: torch.Tensor, schedule: Schedule) -> Canvas:
        if not self.likeliest:
            begun.append(self.key.position)
        return denoised(self, logits, schedule)

    monkeypatch.setattr(Canvas, "denoised", noting)
    engine = make_engine(folder, replace(ENGINE, max_num_batched_tokens=3 * LENGTH + 2))
    for number in range(6):
        engine.add(spec_of(f"{number}", prompts()[2], 32, seed=number), Purpose.GENERATE, 0.0)
    most, num_steps = 0, 0
    while engine.load().running or engine.load().waiting:
        step, _ = engine.schedule(0.0)
        assert engine.load().running <= 3
        most = max(most, step.num_scheduled_tokens + LENGTH * sum(part.sample for part in step.parts))
        engine.commit(step, engine.runner.execute(step), 0.0)
        num_steps += 1
    assert sorted(begun) == [LENGTH] * 6 + [2 * LENGTH] * 6
    assert 2 * LENGTH < most <= 4 * LENGTH + 2
    assert num_steps < 6 * 2 * GENERATION["max_denoising_steps"], "canvases are denoised together"


@pytest.mark.parametrize("fails", [False, True])
def test_a_sequence_that_missed_a_step_may_have_other_blocks(fails: bool, folder: Path, model: Any) -> None:
    """All but its last token was found in the cache after a preemption: that one is computed again.

    The step that it missed may have failed.
    """
    prompt, found = prompts()[1], list[list[int]]()
    for seed in range(3):
        engine = make_engine(folder)
        engine.add(spec_of("one", prompt, 16, seed=seed), Purpose.GENERATE, 0.0)
        for _ in range(3):
            step, _ = engine.schedule(0.0)
            engine.commit(step, engine.runner.execute(step), 0.0)
        (part,) = engine.schedule(0.0)[0].parts
        assert len(part.token_ids) == 1
        if fails:
            with pytest.raises(IndexError):
                engine.runner.execute(StepInput((part._replace(sequence_key=-1, token_ids=(VOCAB_SIZE,)),)))
        else:
            engine.runner.execute(StepInput(()))
        for group in engine.runner.caches[0].groups:
            group[:, 20] = float("nan")
        moved = part._replace(block_ids=tuple((table[0], 20) for table in part.block_ids))
        tokens: tuple[int, ...] = ()
        while not tokens:
            (tokens,) = engine.runner.execute(StepInput((moved,))).sampled_token_ids
        found.append(list(tokens))
    require_same(found, [generated(model, prompt, 16, seed)[0] for seed in range(3)])


def test_no_step_is_planned_before_the_canvases_are_known(folder: Path) -> None:
    specs = [spec_of(f"{i}", prompts()[i], 40) for i in (0, 1, 3)]
    expected, _ = tokens_of(make_engine(folder), specs, ahead=False)
    got, num_ahead = tokens_of(make_engine(folder), specs, ahead=True)
    assert (num_ahead, [len(tokens) for tokens in got]) == (0, [40] * len(specs))
    require_same(got, expected)


def test_the_last_token_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, num_written = make_engine(folder), 0
    write = Pages.write

    def counting(self: Pages, table: torch.Tensor, begin: int, *values: torch.Tensor) -> None:
        nonlocal num_written
        num_written += values[0].shape[2]
        write(self, table, begin, *values)

    monkeypatch.setattr(Pages, "write", counting)
    ((tokens,), _) = answers(engine, [spec_of("one", prompts()[1], 40)], steps_between=0)
    assert num_written == 4 * (len(prompts()[1]) + 32), "four layers, the prompt and two canvases"
    assert len(tokens) == 40


def test_a_step_keeps_its_keys_and_values_in_the_pages_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder)
    monkeypatch.setattr("transformers.models.diffusion_gemma.modeling_diffusion_gemma.DynamicCache", None)
    ((tokens,), _) = answers(engine, [spec_of("one", prompts()[3], 20)], steps_between=0)
    assert len(tokens) == 20


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"logprobs": 2}, "logprobs"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"logit_bias": ((3, 1.0),)}, "logit_bias"),
    ],
)
def test_parameters_for_tokens_one_after_another_are_refused(values: dict[str, Any], name: str, folder: Path) -> None:
    spec = spec_of("r", [5, 6], 4)
    changed = replace(spec, sampling=replace(spec.sampling, **values))
    with pytest.raises(InvalidRequest, match=f"^{name} needs a model that draws one token after another; this one"):
        _engine_to_ask(folder).add(changed, Purpose.GENERATE, 0.0)


def test_what_a_client_has_asked_for_is_named(folder: Path) -> None:
    """Routers set log probabilities for best_of, and a structure for tool_choice."""
    spec = spec_of("r", [5, 6], 4)
    for values, sentence in (
        ({"logprobs": 0}, r"lengths \(best_of above n asks for them\)$"),
        (
            {"structured_outputs": StructuredOutputs(regex="a+"), "ignore_eos": False},
            "lengths .response_format, and tool_choice other",
        ),
    ):
        changed = replace(spec, sampling=replace(spec.sampling, **values))
        with pytest.raises(InvalidRequest, match=sentence):
            _engine_to_ask(folder).add(changed, Purpose.GENERATE, 0.0)


def test_why_images_are_refused(folder: Path) -> None:
    assert _engine_to_ask(folder).runner.images == "the prompts of models that denoise a canvas are read as text alone"


@cache
def _engine_to_ask(folder: Path) -> Engine:
    return make_engine(folder)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tensor_parallel": 2}, "engine.tensor_parallel is not supported by models that denoise a canvas"),
        ({"kv_dtype": "int8"}, "engine.kv_dtype int8 is not supported by models that denoise a canvas"),
        ({"max_adapters": 2}, "engine.max_adapters is not supported by models that denoise a canvas"),
    ],
)
def test_settings_without_a_meaning_are_refused(values: dict[str, Any], sentence: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_engine(folder, replace(ENGINE, **values))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"sampler_config": {"_cls_name": "Other"}}, "has a sampler_config that is not supported"),
        ({"max_denoising_steps": 0}, "asks for 0 denoising steps"),
        ({"max_denoising_steps": 10**9}, "asks for 1000000000 denoising steps"),
        ({"t_min": 0.9}, "must have 0 < t_min < t_max"),
        ({"confidence_threshold": "low"}, "has 'low' where a number must be"),
    ],
)
def test_a_schedule_that_means_nothing_is_refused(
    values: dict[str, Any], sentence: str, folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("cache"))
    (copy / "generation_config.json").write_text(json.dumps(GENERATION | values))
    with pytest.raises(ModelLoadError, match=sentence):
        make_engine(copy)


def test_pages_that_are_written_to_other_places_are_noticed_at_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Pages.write
    monkeypatch.setattr(
        Pages, "write", lambda self, table, begin, *values: write(self, table, begin and begin - 1, *values)
    )
    with pytest.raises(ModelLoadError, match="models of type 'diffusion_gemma' are not supported: over the KV cache"):
        make_engine(folder)
