"""Denoising of a canvas, on numbers that can be checked by hand."""

from __future__ import annotations

import math

import torch

from engine.model.canvas import Canvas, NoiseKey, Schedule, draws, entropies, within_bound

KEY = NoiseKey(seed=7, choice_index=1, position=300)
NOISE_TOKENS = [255562, 9772, 32785, 146777]
NOISE_NUMBERS = [0.52930095506, 0.277268544223, 0.856830346494, 0.96894055977]


def logits_of(token_ids: list[int], sharpness: float = 40.0, vocab_size: int = 8) -> torch.Tensor:
    return sharpness * torch.nn.functional.one_hot(torch.tensor(token_ids), vocab_size).float()


def test_noise_is_part_of_the_contract_of_the_sampler() -> None:
    """Workers of other versions continue the same answers."""
    noise = KEY.of_step(3, 4, 262_144)
    assert noise.token_ids.tolist() == NOISE_TOKENS
    assert [round(number, 12) for number in noise.uniform.tolist()] == NOISE_NUMBERS


def test_noise_depends_on_seed_choice_position_and_step() -> None:
    keys = [KEY, KEY._replace(seed=8), KEY._replace(choice_index=2), KEY._replace(position=316)]
    steps = [(key, 0) for key in keys] + [(KEY, 1)]
    assert len({tuple(key.of_step(step, 16, 1000).token_ids.tolist()) for key, step in steps}) == 5
    assert KEY._replace(seed=7 - 2**64).of_step(0, 4, 1000).token_ids.tolist() == (
        KEY.of_step(0, 4, 1000).token_ids.tolist()
    )


def test_noise_is_uniform() -> None:
    noise = KEY.of_step(0, 20_000, 10)
    assert 0 <= float(noise.uniform.min()) < float(noise.uniform.max()) < 1
    assert abs(float(noise.uniform.mean()) - 0.5) < 0.01
    assert noise.token_ids.bincount().float().sub(2000).abs().max() < 200


def test_places_are_kept_while_the_entropies_before_them_are_within_the_bound() -> None:
    entropy = torch.tensor([0.5, 0.1, 0.2, 2.0])
    assert within_bound(entropy, 0.0).tolist() == [False, True, False, False]
    assert within_bound(entropy, 0.11).tolist() == [False, True, True, False]
    assert within_bound(entropy, 0.31).tolist() == [True, True, True, False]
    assert within_bound(entropy, 0.81).tolist() == [True, True, True, True]


def test_entropies_are_in_nats() -> None:
    found = entropies(torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]]))
    assert torch.allclose(found, torch.tensor([math.log(4), 0.0]), atol=1e-6)


def test_a_draw_is_the_token_at_its_number() -> None:
    logits = torch.tensor([0.25, 0.5, 0.0, 0.25]).log().expand(70, -1)
    numbers = torch.arange(70, dtype=torch.float64) / 70
    expected = [0 if number < 0.25 else 1 if number < 0.75 else 3 for number in numbers.tolist()]
    assert draws(logits, numbers).tolist() == expected


def test_a_canvas_ends_when_it_is_stable_and_sure() -> None:
    schedule = Schedule(num_steps=9, entropy_bound=1e6, num_stable=2)
    canvas = Canvas(key=KEY, token_ids=torch.zeros(2, dtype=torch.int64), num_left=9, is_drawn=True)
    ends = []
    for token_ids in ([1, 2], [1, 3], [1, 3], [1, 3]):
        canvas = canvas.denoised(logits_of(token_ids), schedule)
        ends.append(canvas.is_finished)
    assert ends == [False, False, False, True]
    assert canvas.result == (1, 3)


def test_a_canvas_that_need_not_be_stable_ends_when_it_is_sure() -> None:
    schedule = Schedule(num_steps=9, entropy_bound=1e6, num_stable=0)
    canvas = Canvas(key=KEY, token_ids=torch.zeros(2, dtype=torch.int64), num_left=9, is_drawn=True)
    ends = []
    for token_ids, sharpness in (([1, 2], 1.0), ([1, 2], 1.0), ([1, 3], 40.0)):
        canvas = canvas.denoised(logits_of(token_ids, sharpness), schedule)
        ends.append(canvas.is_finished)
    assert ends == [False, False, True]
    assert canvas.result == (1, 3)


def test_a_canvas_that_is_not_sure_goes_on_to_its_last_step() -> None:
    schedule = Schedule(num_steps=3, confidence=0.5)
    canvas = Canvas(key=KEY, token_ids=torch.zeros(2, dtype=torch.int64), num_left=3, is_drawn=True)
    ends = []
    for _ in range(3):
        canvas = canvas.denoised(logits_of([1, 2], 1.0), schedule)
        ends.append(canvas.is_finished)
    assert ends == [False, False, True]
    assert canvas.result == (1, 2)


def test_places_that_are_not_kept_are_noise_again() -> None:
    schedule = Schedule(num_steps=9, entropy_bound=1e-3)
    canvas = Canvas(key=KEY, token_ids=torch.zeros(4, dtype=torch.int64), num_left=9, is_drawn=True)
    logits = logits_of([5, 6, 7, 6])
    logits[1] = logits[3] = 0.0
    after = canvas.denoised(logits, schedule)
    drawn = int(draws(logits[1:2], KEY.of_step(1, 4, 8).uniform[1:2]))
    assert after.token_ids.tolist() == [5, drawn, 7, int(KEY.of_step(1, 4, 8).token_ids[3])]


def test_the_temperature_falls_linearly() -> None:
    schedule = Schedule(num_steps=4, least_temperature=0.4, most_temperature=0.8)
    assert [round(schedule.temperature(left), 6) for left in (4, 3, 2, 1)] == [0.8, 0.7, 0.6, 0.5]
