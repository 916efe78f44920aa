"""Models with eyes answer prompts with images as transformers' `generate`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import shutil
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.context import Context
from PIL import Image
from transformers.image_utils import load_image

from baton.config import ModelConfig
from baton.errors import ImagesMissing, InvalidRequest, Unsupported
from baton.messages import DecodeRequest, FirstToken, PrefillRequest, SequenceSpec, Ticket
from baton.scores import TokenScores
from baton.tasks import cancel_and_wait
from decode_worker.service import DecodeService
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.core.outputs import Generated, Output, Refused, Reserved
from engine.core.runner import StepInput, StepPart
from engine.core.sequence import Purpose
from engine.model import pretrained
from engine.model.decode_graphs import padded_numbers
from engine.model.image_reader import ProcessedImages, reader_of
from engine.model.images import RankImages
from engine.model.rank_step import RankStep
from prefill_worker.service import PrefillService
from tests.integration import test_beams
from tests.integration.test_engine_models import (
    ENGINE,
    answers,
    edit_weights,
    make_engine,
    same_up_to_near_ties,
    tokens_of,
    without,
)
from tests.integration.test_families import SLOTS, rest_of
from tests.support.builders import sequence_spec
from tests.support.pictures import KINDS, Prompt, picture, placed, processor_of, refer, save_with_eyes, written
from tests.unit.kvstore.transfer.peers import engine_worker

pytestmark = pytest.mark.integration
NUM_TOKENS = 12
SEED = sequence_spec().cache_seed
Part = int | bytes


@dataclass(frozen=True)
class Saved:
    """A folder and its model, which is the reference."""

    kind: str
    folder: Path
    model: Any

    def refer(self, parts: Sequence[Part], num_tokens: int = NUM_TOKENS) -> Any:
        return refer(self.model, written(self.kind, parts), num_tokens)

    def written(self, parts: Sequence[Part]) -> Prompt:
        return written(self.kind, parts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    @cache
    def make(kind: str) -> Saved:
        folder = tmp_path_factory.mktemp(kind)
        return Saved(kind, folder, save_with_eyes(kind, folder))

    return make


def text(seed: int, length: int) -> list[Any]:
    draw = random.Random(seed)
    return [draw.randrange(30, 490) for _ in range(length)]


def spec_of(engine: Engine, name: str, parts: Sequence[Part], **values: Any) -> SequenceSpec:
    store = engine.runner.images
    fields = placed([part if isinstance(part, int) else store.look(part, SEED) for part in parts])  # type: ignore[union-attr]
    return sequence_spec(request_id=name, **{"max_tokens": NUM_TOKENS} | fields | values)


def prompts() -> list[list[Part]]:
    wide, high, small = picture(1), picture(2, 80, 190), picture(3, 40, 40)
    return [
        [*text(1, 5), wide, *text(2, 9)],
        text(3, 40),
        [*text(4, 3), high, *text(5, 4), wide, *text(6, 20), small, *text(7, 2)],
        [small, *text(8, 1)],
        [*text(9, 70), wide, *text(10, 33)],
        text(11, 3),
    ]


def num_same(saved: Saved, engine: Engine, prompts: Sequence[Sequence[Part]], steps_between: int = 1) -> int:
    specs = [spec_of(engine, str(number), parts) for number, parts in enumerate(prompts)]
    for spec, parts in zip(specs, prompts, strict=True):
        assert list(spec.token_ids) == saved.written(parts).token_ids
    found, _ = answers(engine, specs, steps_between)
    references = [saved.refer(parts) for parts in prompts]
    assert len({token for each in references for token in each.tokens}) > 20, "answers of few tokens are no test"
    return sum(map(same_up_to_near_ties, found, references))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_answers_as_generate(kind: str, saved: Callable[[str], Saved]) -> None:
    model = saved(kind)
    assert num_same(model, make_engine(model.folder), prompts()) >= 5


AGAIN = ("smolvlm", "qwen2_vl", "qwen3_vl")


@pytest.mark.parametrize("kind", AGAIN)
def test_steps_planned_ahead_and_preemption_change_nothing(kind: str, saved: Callable[[str], Saved]) -> None:
    model = saved(kind)
    engine = make_engine(model.folder)
    specs = [spec_of(engine, str(number), parts) for number, parts in enumerate(prompts())]
    got, num_ahead = tokens_of(engine, specs, ahead=True)
    assert num_ahead > 0
    references = [model.refer(parts) for parts in prompts()]
    assert sum(map(same_up_to_near_ties, got, references)) >= 5
    few = [[picture(seed, 40, 40), *text(seed, 6)] for seed in range(6)]
    engine = make_engine(model.folder, replace(ENGINE, num_blocks=14))
    got, _ = answers(engine, [spec_of(engine, str(n), parts, max_tokens=40) for n, parts in enumerate(few)], 0)
    assert sum(same_up_to_near_ties(each, model.refer(parts, 40)) for each, parts in zip(got, few, strict=True)) >= 4
    assert engine.load().preemptions > 0


@pytest.mark.parametrize("kind", ["smolvlm", "qwen2_vl"])
def test_a_step_that_does_not_fit_is_computed_in_halves(
    kind: str, saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(saved(kind).folder, replace(ENGINE, max_num_batched_tokens=256))
    rank = engine.runner.rank  # type: ignore[attr-defined]
    compute, num_failed = rank.compute, 0

    def too_large(step: RankStep, *others: Any) -> Any:
        nonlocal num_failed
        if len(step.parts) > 2:
            num_failed += 1
            raise torch.OutOfMemoryError("a test")
        return compute(step, *others)

    monkeypatch.setattr(rank, "compute", too_large)
    assert num_same(saved(kind), engine, prompts(), 0) >= 5
    assert num_failed > 0


@pytest.mark.parametrize("kind", AGAIN)
def test_images_are_cached_by_what_they_show(kind: str, saved: Callable[[str], Saved]) -> None:
    model = saved(kind)
    engine = make_engine(model.folder)
    before, after = text(1, 20), text(2, 40)
    first, other = [*before, picture(1), *after], [*before, picture(2), *after]
    cut = [*before, picture(1), *text(3, 3)]

    def cached(parts: Sequence[Part]) -> int:
        spec = spec_of(engine, "one", parts)
        (found,), (sequence,) = answers(engine, [spec], 0)
        assert same_up_to_near_ties(found, model.refer(parts))
        return sequence.num_cached_tokens

    assert cached(first) == 0
    assert cached(other) == 16, "of the same size, with the same text"
    num_tokens = len(model.written(first).token_ids)
    assert cached(first) >= (num_tokens - 1) // 16 * 16
    assert cached(cut) == (len(model.written(cut).token_ids) - 1) // 16 * 16
    assert cached([*before, picture(2), *text(3, 3)]) % 16 == 0


@pytest.mark.parametrize("kind", AGAIN)
def test_a_cached_prefix_may_end_inside_an_image(kind: str, saved: Callable[[str], Saved]) -> None:
    """As one that was pulled from another worker."""
    model = saved(kind)
    engine = make_engine(model.folder)
    parts = [*text(1, 5), picture(1), *text(2, 3)]
    spec = spec_of(engine, "one", parts)
    (image,) = spec.images
    assert image.offset < 16 < 19 < image.end
    shorter = replace(spec.prefix(19), sampling=replace(spec.sampling, max_tokens=1))
    answers(engine, [shorter], 0)
    (found,), (sequence,) = answers(engine, [spec], 0)
    assert sequence.num_cached_tokens == 16
    assert same_up_to_near_ties(found, model.refer(parts))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_the_model_wherever_a_part_starts_and_ends(
    kind: str, saved: Callable[[str], Saved]
) -> None:
    model = saved(kind)
    engine = make_engine(model.folder)
    images = engine.runner.rank.images  # type: ignore[attr-defined]
    draw = random.Random(3)
    for seed in range(6):
        parts: list[Part] = text(seed, draw.randrange(1, 4))
        for number in range(draw.randrange(1, 4)):  # transformers needs a token between two images
            parts += [picture(number, draw.randrange(20, 300), draw.randrange(20, 300)), *text(number, 1 + seed % 3)]
        parts = parts[: -1 - seed % 3] if seed % 2 else parts
        spec, prompt = spec_of(engine, "one", parts), model.written(parts)
        expected = model.model.model.get_rope_index(
            torch.tensor([prompt.token_ids]),
            mm_token_type_ids=prompt.inputs["mm_token_type_ids"],
            image_grid_thw=prompt.inputs["image_grid_thw"],
        )[0][:, 0]
        length = len(prompt.token_ids)
        for _ in range(40):
            begin = draw.randrange(length)
            end = draw.randrange(begin, length) + 1
            part = step_part(spec, begin, end)
            found = images.step_positions([part])
            assert torch.equal(found.expand(3, -1), expected[:, begin:end])
        for place in range(length, length + 3):
            assert images.decode_position(step_part(spec, place, place + 1)) == expected.max() + 1 + place - length


def step_part(spec: SequenceSpec, begin: int, end: int, **values: Any) -> StepPart:
    return StepPart(
        sequence_key=0,
        token_ids=(5,) * (end - begin),
        num_computed_tokens=begin,
        block_ids=((),),
        num_kv_tokens=(end,),
        sample=False,
        is_decoding=end == begin + 1,
        sampling=spec.sampling,
        choice_index=0,
        num_prompt_tokens=spec.num_prompt_tokens,
        images=spec.images,
        **values,
    )


def test_graphs_of_decode_steps_get_the_positions(saved: Callable[[str], Saved]) -> None:
    """A step with placeholders gets none, even if it is one token that samples."""

    class Graphs:
        def compute(self, step: RankStep, *others: Any) -> None:
            given.append((step.parts, others[-1]))

    model = saved("qwen2_vl")
    engine = make_engine(model.folder)
    images = engine.runner.rank.images  # type: ignore[attr-defined]
    given: list[tuple[Sequence[StepPart], list[int] | None]] = []
    engine.runner.rank._graphs = Graphs()  # type: ignore[attr-defined]
    last = [*text(1, 29), picture(1)]  # its last token alone is a part of the second step
    asked = [last, prompts()[0], prompts()[1]]
    found, _ = answers(engine, [spec_of(engine, str(n), parts) for n, parts in enumerate(asked)], 3)
    # If a prompt ends with an image, `generate` goes on from the place of its last patch, and not after the image.
    assert sum(same_up_to_near_ties(each, model.refer(p)) for each, p in zip(found[1:], asked[1:], strict=True)) >= 1
    assert any(positions is not None for _, positions in given)
    for parts, positions in given:
        assert not images.has_placeholders(parts)
        if any(part.images for part in parts):
            assert positions == [images.decode_position(part) for part in parts]
        else:
            assert positions is None
    part = step_part(spec_of(engine, "one", prompts()[0]), 40, 41)
    found_numbers, plain = padded_numbers([part], [7], 2, [23]), padded_numbers([part], [7], 2)
    assert (found_numbers[1].tolist(), plain[1].tolist()) == ([23, 0], [40, 0])
    assert torch.equal(found_numbers[2:], plain[2:])


@pytest.mark.parametrize("kind", AGAIN)
def test_half_an_answer_is_resumed(kind: str, saved: Callable[[str], Saved]) -> None:
    model = saved(kind)
    for parts in prompts()[:3]:
        reference = model.refer(parts)
        engine = make_engine(model.folder)
        spec = spec_of(engine, "one", parts)
        spec = replace(spec, token_ids=(*spec.token_ids, *reference.tokens[:5]))
        (found,), _ = answers(engine, [spec], 0)
        same_up_to_near_ties([*reference.tokens[:5], *found], reference)


@pytest.mark.parametrize("kind", AGAIN)
def test_choices_that_fork_see_the_image(kind: str, saved: Callable[[str], Saved]) -> None:
    model = saved(kind)
    engine, parts = make_engine(model.folder), prompts()[0]
    specs = [replace(spec_of(engine, "one", parts), choice_index=choice) for choice in range(3)]
    running = engine.add(specs[0], Purpose.GENERATE, 0.0)
    found: dict[int, list[int]] = {running.key: []}
    time_s = 0.0
    while engine.load().running or engine.load().waiting or len(found) < 3:
        step, _ = engine.schedule(time_s)
        for output in engine.commit(step, engine.runner.execute(step), time_s):
            assert isinstance(output, Generated)
            found[output.sequence_key] += output.token_ids
        if running.num_output_tokens and len(found) < 3:
            for spec in specs[1:]:
                found[engine.add(spec, Purpose.GENERATE, time_s).key] = []
        time_s += 1
    reference = model.refer(parts)
    assert all(same_up_to_near_ties(tokens, reference) for tokens in found.values())


def test_beams_with_an_image_are_those_of_transformers(saved: Callable[[str], Saved]) -> None:
    model = saved("qwen2_vl")
    engine, parts = make_engine(model.folder), prompts()[0]
    prompt = model.written(parts)
    spec = spec_of(engine, "one", parts)
    params = test_beams.spec_of("one", prompt.token_ids, beam_width=3).sampling
    (found,) = test_beams.searched(engine, [replace(spec, sampling=params)])
    token_ids = torch.tensor([prompt.token_ids])
    out = model.model.generate(
        input_ids=token_ids, attention_mask=torch.ones_like(token_ids), **prompt.inputs, do_sample=False, num_beams=3,
        max_new_tokens=params.max_tokens, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert list(found[0].token_ids) == out[0, len(prompt.token_ids) :].tolist()


@pytest.mark.parametrize("kind", AGAIN)
def test_prompt_scores_are_those_of_the_whole_model(kind: str, saved: Callable[[str], Saved]) -> None:
    model = saved(kind)
    engine, parts = make_engine(model.folder), prompts()[2]
    prompt = model.written(parts)
    sequence = engine.add(spec_of(engine, "one", parts, prompt_logprobs=1), Purpose.GENERATE, 0.0)
    scores: TokenScores | None = None
    while scores is None:
        step, _ = engine.schedule(0.0)
        for output in engine.commit(step, engine.runner.execute(step), 0.0):
            assert isinstance(output, Generated)
            scores = output.report.prompt_scores if output.report else None
    engine.end(sequence)
    with torch.no_grad():
        logits = model.model(input_ids=torch.tensor([prompt.token_ids]), **prompt.inputs).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt.token_ids[1:])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(scores.logprobs), expected, atol=2e-4)


def test_a_placeholder_is_no_draft_and_a_generated_one_is_a_token(saved: Callable[[str], Saved]) -> None:
    """The model says its placeholder again and again: it has no image then, for transformers as here."""
    model = saved("qwen2_vl")
    parts: list[Part] = [*text(1, 5), picture(1), *text(2, 9)]
    engine = make_engine(model.folder)
    store = engine.runner.images
    assert not isinstance(store, str)
    spec = spec_of(
        engine, "one", parts, logit_bias=((store.placeholder, 100.0),), presence_penalty=0.1, dry_multiplier=0.5
    )
    drafted = list[int]()
    sequence = engine.add(spec, Purpose.GENERATE, 0.0)
    tokens = list[int]()
    while engine.load().running or engine.load().waiting:
        step, _ = engine.schedule(0.0)
        drafted += [token for part in step.parts if part.num_drafts for token in part.token_ids[-part.num_drafts :]]
        for output in engine.commit(step, engine.runner.execute(step), 0.0):
            assert isinstance(output, Generated)
            tokens += output.token_ids
        engine.learn(step.size(), 0.01)
    assert store.placeholder in tokens
    assert store.placeholder not in drafted
    assert sequence.num_output_tokens == NUM_TOKENS


@pytest.mark.parametrize("kind", AGAIN)
async def test_the_decode_worker_needs_no_pixels(kind: str, saved: Callable[[str], Saved]) -> None:
    model = saved(kind)
    runners: list[Any] = [make_engine(model.folder).runner for _ in range(2)]
    for parts in prompts()[:3]:
        async with (
            engine_worker("prefill", runners[0], SLOTS) as prefill,
            engine_worker("decode", runners[1], SLOTS) as decode,
        ):
            seen = iter(await prefill.loop.look([part for part in parts if isinstance(part, bytes)], SEED))
            fields = placed([part if isinstance(part, int) else next(seen) for part in parts])
            spec = sequence_spec(request_id="one", max_tokens=NUM_TOKENS, **fields)
            answer = DecodeService(decode.context).decode(DecodeRequest(spec, await_kv=True), Context())
            ticket = await anext(answer)
            assert isinstance(ticket, Ticket)
            rest = asyncio.create_task(rest_of(answer))
            async for event in PrefillService(prefill.context).prefill(PrefillRequest(spec, ticket), Context()):
                if isinstance(event, FirstToken):
                    assert event.token_id is not None
                    first = event.token_id
            assert same_up_to_near_ties([first, *await rest], model.refer(parts))
            assert runners[1].images.num_bytes == 0


def run_until_idle(engine: Engine, *, ahead: bool) -> list[Output]:
    """All outputs of the sequences that were added."""
    outputs = list[Output]()
    step, _ = engine.schedule(0.0)
    launched = engine.runner.launch(step)
    while step:
        scheduled = engine.schedule_ahead(step, 0.0) if ahead else None
        following = StepInput(()) if scheduled is None else scheduled[0]
        behind = engine.runner.launch(following) if following else None
        outputs += engine.commit(step, launched.collect(), 0.0)
        engine.check()
        step = following or engine.schedule(0.0)[0]
        if step:
            launched = behind or engine.runner.launch(step)
    return outputs


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sequence_whose_images_are_missing_ends_alone(ahead: bool, saved: Callable[[str], Saved]) -> None:
    """As one that another worker's KV began, and that has lost its blocks here."""
    model = saved("qwen2_vl")
    engine, other = (make_engine(model.folder, replace(ENGINE, max_num_batched_tokens=80)) for _ in range(2))
    blind = engine.add(spec_of(other, "blind", prompts()[0]), Purpose.GENERATE, 0.0)
    seeing = engine.add(spec_of(engine, "seeing", prompts()[3]), Purpose.GENERATE, 0.0)
    outputs = run_until_idle(engine, ahead=ahead)
    refused = [output for output in outputs if isinstance(output, Refused)]
    assert [(each.sequence_key, type(each.error)) for each in refused] == [(blind.key, ImagesMissing)]
    tokens = [t for o in outputs if isinstance(o, Generated) and o.sequence_key == seeing.key for t in o.token_ids]
    assert same_up_to_near_ties(tokens, model.refer(prompts()[3]))
    assert not engine.sequences
    engine.add(spec_of(other, "alone", prompts()[0]), Purpose.GENERATE, 0.0)
    (output,) = run_until_idle(engine, ahead=ahead)
    assert isinstance(output, Refused)


def test_embeddings_and_pixels_that_were_dropped_are_computed_again(saved: Callable[[str], Saved]) -> None:
    model = saved("qwen3_vl")
    pictures = [picture(seed) for seed in range(4)]
    num_bytes = 2 * max(map(len, pictures)) + 5 * 1024
    engine = make_engine(model.folder, replace(ENGINE, image_cache_gib=num_bytes / 2**30))
    parts = [part for each in pictures for part in (*text(len(each), 3), each)] + text(1, 2)
    store = engine.runner.images
    assert not isinstance(store, str)
    spec = spec_of(engine, "one", parts[:8] + text(1, 2))
    assert store.num_bytes <= num_bytes
    with store.pinned(spec.images):
        (found,), _ = answers(engine, [spec], 0)
    assert same_up_to_near_ties(found, model.refer(parts[:8] + text(1, 2)))
    assert store.num_bytes <= num_bytes


@pytest.mark.parametrize("is_encoded", [False, True])
def test_images_that_are_evicted_while_their_step_begins_are_computed(
    is_encoded: bool, saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved("qwen2_vl")
    parts = [[*text(1, 5), picture(1), *text(2, 9)], text(3, 30)]
    num_bytes = 3 * max(len(picture(seed)) for seed in (1, *range(10, 14)))
    engine = make_engine(model.folder, replace(ENGINE, image_cache_gib=num_bytes / 2**30))
    images, of_step = engine.runner.rank.images, RankImages.of_step  # type: ignore[attr-defined]
    specs = [spec_of(engine, str(number), each) for number, each in enumerate(parts)]
    if is_encoded:
        images.store.prepare(specs[0].images)

    def after_others(self: RankImages, *given: Any) -> Any:
        for seed in range(10, 14):
            seen = self.store.look(picture(seed), SEED)
            self.store.prepare([seen.placed(0)])
        return of_step(self, *given)

    monkeypatch.setattr(RankImages, "of_step", after_others)
    found, _ = answers(engine, specs, 0)
    assert all(same_up_to_near_ties(each, model.refer(given)) for each, given in zip(found, parts, strict=True))
    assert not images.store.holds(specs[0].images), "nothing is kept after the step"


# -- the worker's interface ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def looped(engine: Engine) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(engine, 100)
    running = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        await cancel_and_wait([running])


async def test_a_sequence_needs_its_images_where_it_is_computed(saved: Callable[[str], Saved]) -> None:
    model = saved("smolvlm")
    async with looped(make_engine(model.folder)) as loop, looped(make_engine(model.folder)) as other:
        assert loop.takes_images
        assert loop.image_placeholder == 3
        (seen,) = await other.look([picture(1)], SEED)
        fields = placed([*text(1, 4), seen, *text(2, 4)])
        spec = sequence_spec(request_id="one", **fields)
        for purpose in (Purpose.GENERATE, Purpose.PREFILL):
            with pytest.raises(ImagesMissing, match="send them with the request"):
                async with loop.sequence(spec, purpose):
                    pass
        async with loop.sequence(spec, Purpose.RECEIVE) as sequence:
            assert isinstance(await sequence.next(), Reserved)
        await loop.keep_images([picture(1)], SEED)
        async with loop.sequence(spec, Purpose.GENERATE) as sequence:
            tokens = list[int]()
            while len(tokens) < 8:
                output = await sequence.next()
                assert isinstance(output, Generated)
                tokens += output.token_ids
        assert same_up_to_near_ties(tokens, model.refer([*text(1, 4), picture(1), *text(2, 4)], 8))


@pytest.mark.parametrize(
    "change",
    [
        {"grid": (1, 9, 9)},
        {"grid": (1, 2**40, 2**40)},
        {"grid": (1, 0, 2)},
        {"grid": (1,)},
        {"grid": ()},
        {"num_tokens": 3},
        {"offset": 5},
    ],
)
@pytest.mark.parametrize("kind", ["smolvlm", "qwen2_vl"])
async def test_an_image_in_a_wrong_place_is_refused(
    kind: str, change: dict[str, Any], saved: Callable[[str], Saved]
) -> None:
    async with looped(make_engine(saved(kind).folder)) as loop:
        (seen,) = await loop.look([picture(1)], SEED)
        fields = placed([*text(1, 4), seen, *text(2, 4)])
        spec = sequence_spec(**fields | {"images": (replace(fields["images"][0], **change),)})
        for purpose in (Purpose.GENERATE, Purpose.RECEIVE):
            with pytest.raises(InvalidRequest):
                async with loop.sequence(spec, purpose):
                    pass


async def test_where_images_are_off_the_sentence_says_why(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    model = saved("qwen2_vl")
    engine = make_engine(model.folder, replace(ENGINE, images="off"))
    loaded = sum(weight.numel() for weight in engine.runner.rank.model.parameters())  # type: ignore[attr-defined]
    assert loaded < sum(weight.numel() for weight in model.model.parameters())
    async with looped(engine) as loop:
        assert not loop.takes_images
        assert loop.image_placeholder is None
        with pytest.raises(Unsupported, match=r"takes no images here: engine\.images is off"):
            await loop.look([picture(1)], SEED)
        async with looped(make_engine(model.folder)) as other:
            (seen,) = await other.look([picture(1)], SEED)
        with pytest.raises(Unsupported, match=r"takes no images here: engine\.images is off"):
            async with loop.sequence(sequence_spec(**placed([seen, 5])), Purpose.GENERATE):
                pass
    assert num_same(model, engine, [text(seed, 20) for seed in range(4)]) >= 3


def reason_of(folder: Path, **settings: Any) -> str:
    found = make_engine(folder, replace(ENGINE, **settings)).runner.images
    assert isinstance(found, str)
    return found


def copied(model: Saved, folder: Path) -> Path:
    shutil.copytree(model.folder, folder, dirs_exist_ok=True)
    return folder


def test_what_is_not_computed_is_no_image_and_text_is_served(
    saved: Callable[[str], Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved("qwen2_vl")
    positions = RankImages.positions
    with monkeypatch.context() as patch:
        patch.setattr(RankImages, "positions", lambda images, part: positions(images, part._replace(images=())))
        engine = make_engine(model.folder)
    assert isinstance(engine.runner.images, str)
    assert "over the KV cache this model computes" in engine.runner.images
    assert "this worker takes no images: a test image is computed otherwise" in caplog.text
    assert num_same(model, engine, [text(seed, 20) for seed in range(4)]) >= 3
    loaded = sum(weight.numel() for weight in engine.runner.rank.model.parameters())  # type: ignore[attr-defined]
    assert loaded < sum(weight.numel() for weight in model.model.parameters())
    folder = copied(model, tmp_path / "other")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    assert reason_of(folder) == "images that need a CLIPImageProcessorPil are not supported"
    (folder / "preprocessor_config.json").write_text(
        '{"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 4}'
    )
    assert "merges 4 patches per side, and its config.json says 2" in reason_of(folder)
    (folder / "preprocessor_config.json").write_text("{")
    assert "its image processor cannot be used" in reason_of(folder)
    (folder / "preprocessor_config.json").unlink()
    assert reason_of(folder) == "the model's folder has no preprocessor_config.json"
    assert reason_of(model.folder, max_model_len=16).endswith(
        "sequences are shorter than 36 tokens, that of a test image"
    )


def test_a_checkpoint_without_its_encoder_serves_text(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    folder = copied(saved("qwen2_vl"), tmp_path / "text")
    edit_weights(folder, without("visual"))
    assert "lacks model.visual" in reason_of(folder)


# -- bytes of clients ------------------------------------------------------------------------------------------------


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    made = io.BytesIO()
    image.save(made, kind, **options)
    return made.getvalue()


def noise(width: int = 60, height: int = 50, mode: str = "RGB") -> Image.Image:
    return Image.open(io.BytesIO(picture(1, width, height))).convert(mode)


def frames(kind: str) -> bytes:
    return encoded(noise(), kind, save_all=True, append_images=[Image.open(io.BytesIO(picture(2, 60, 50)))])


def bomb() -> bytes:
    """A PNG of a few bytes that says that it has 20,000 x 20,000 pixels."""
    made = encoded(Image.new("L", (1, 1)), "PNG")
    header = made[12:16] + (20_000).to_bytes(4, "big") * 2 + made[24:29]
    return made[:12] + header + zlib.crc32(header).to_bytes(4, "big") + made[33:]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no image that is read here; send one of PNG, JPEG, WEBP, GIF"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image that is read here"),
    "pdf": (b"%PDF-1.7\n" + bytes(100), "no image that is read here"),
    "bmp": (encoded(noise(), "BMP"), "no image that is read here"),
    "tiff": (encoded(noise(), "TIFF"), "no image that is read here"),
    "eps": (encoded(noise(), "EPS"), "no image that is read here"),
    "a truncated png": (encoded(noise(), "PNG")[:-80], "it may be truncated"),
    "a truncated jpeg": (encoded(noise(400, 300), "JPEG")[:-3000], "it may be truncated"),
    "a truncated webp": (encoded(noise(400, 300), "WEBP")[:-900], "cannot be"),
    "a spoilt png": (encoded(noise(), "PNG").replace(b"IDAT", b"IDAX"), "no image that is read here"),
    "a bomb": (bomb(), r"20000 x 20000 pixels, more than 25000000|larger than 25000000 pixels"),
    "a large one": (
        encoded(Image.new("1", (5001, 5000)), "PNG"),
        r"5001 x 5000 pixels, .* \(engine.max_image_pixels\)",
    ),
    "a jpeg of many scans": (encoded(noise(400, 300), "JPEG")[:-2] + b"\xff\xda\0\2" * 101, "more than 100 scans"),
    "a moving gif": (frames("GIF"), "animated"),
    "a moving png": (frames("PNG"), "animated"),
    "a moving webp": (frames("WEBP"), "animated"),
    "a line": (encoded(Image.new("RGB", (2000, 3)), "PNG"), "refuses an image of 2000 x 3 pixels: .* aspect ratio"),
}


@pytest.fixture(scope="module")
def reader(saved: Callable[[str], Saved]) -> ProcessedImages:
    return reader_for(saved("qwen2_vl").folder)


def reader_for(folder: Path, max_tokens: int = 300, **settings: Any) -> ProcessedImages:
    config = pretrained.read_config(str(folder))
    found = reader_of(ModelConfig(path=str(folder)), replace(ENGINE, **settings), config, max_tokens)
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_a_sentence(name: str, reader: ProcessedImages) -> None:
    given, sentence = HOSTILE[name]
    with pytest.raises(InvalidRequest, match=sentence) as refusal:
        reader.read(given)
    assert "\n" not in str(refusal.value)


def test_random_bytes_are_an_image_or_a_sentence(reader: ProcessedImages) -> None:
    draw = random.Random(1)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        for _ in range(60):
            given = bytearray(encoded(noise(), kind))
            for _ in range(draw.randrange(1, 6)):
                given[draw.randrange(len(given))] = draw.randrange(256)
            with contextlib.suppress(InvalidRequest):
                assert reader.read(bytes(given)).grid[0] == 1


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_every_kind_of_color_is_read_as_transformers_reads_it(mode: str, reader: ProcessedImages) -> None:
    image = noise().convert("I").convert("I;16") if mode == "I;16" else noise(mode=mode)
    given = encoded(image, "JPEG" if mode == "CMYK" else "PNG")
    found = reader.read(given).pixels["pixel_values"]
    expected = processor_of("qwen2_vl")(images=[load_image(Image.open(io.BytesIO(given)))], return_tensors="np")
    assert (found == expected["pixel_values"]).all()


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "MPO"])
def test_the_formats_that_are_read(kind: str, reader: ProcessedImages) -> None:
    options = {"save_all": True, "append_images": [noise(30, 20)]} if kind == "MPO" else {}
    assert reader.read(encoded(noise(), kind, **options)).grid == (1, 4, 4)


def test_a_photograph_is_turned_as_its_camera_says(reader: ProcessedImages) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert reader.read(encoded(noise(120, 60), "JPEG")).grid == (1, 4, 8)
    assert reader.read(encoded(noise(120, 60), "JPEG", exif=exif.tobytes())).grid == (1, 8, 4)


@pytest.mark.parametrize("kind", ["smolvlm", "qwen2_vl"])
def test_an_image_of_too_many_tokens_is_refused_before_its_pixels_are_prepared(
    kind: str, saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = reader_for(saved(kind).folder, max_image_tokens=15)
    shorter = reader_for(saved(kind).folder, max_tokens=16)
    monkeypatch.setattr(few, "_prepared", lambda image: pytest.fail("it was prepared"))
    for each in (few, shorter):
        with pytest.raises(InvalidRequest, match=r"takes \d+ tokens of a prompt, and at most 15 are allowed"):
            each.read(picture(1, 400, 300))


@pytest.mark.parametrize("kind", ["smolvlm", "qwen2_vl"])
def test_images_of_any_size_have_the_tokens_of_the_processor(kind: str, saved: Callable[[str], Saved]) -> None:
    found = reader_for(saved(kind).folder)
    draw = random.Random(2)
    for _ in range(12):
        given = picture(1, draw.randrange(4, 300), draw.randrange(4, 300))
        assert list(found.token_ids(found.read(given).grid)) == written(kind, [given]).token_ids


@pytest.mark.parametrize("kind", ["smolvlm", "qwen2_vl"])
def test_the_largest_image_has_nearly_as_many_tokens_as_allowed(kind: str, saved: Callable[[str], Saved]) -> None:
    found = reader_for(saved(kind).folder, max_image_tokens=36)
    assert 20 <= len(found.token_ids(found.largest().grid)) <= 36
