"""Denoising of one canvas: a block of tokens that a diffusion model draws together.

    noise     every token is drawn at random
    a step    the model's logits for all places -> draw a token for each place -> keep those of low entropy,
              draw the others at random again
    the end   the likeliest token of each place, once they have not changed and the entropy is low, or after the last
              step

Tokens are kept in order of their entropy while the sum of the entropies before them is within a bound (entropy-bounded
sampling, Ben-Hamu et al., 2025, arXiv:2505.24857). The temperature falls linearly from step to step. Both are as in
transformers' `generation_diffusion_gemma`.

All random numbers of a step follow from the request's seed, the choice, the position of the canvas and the step. So a
canvas that is lost, with its worker or its blocks, is denoised again to the same tokens.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from baton.errors import ModelLoadError
from baton.model_files import read_json

NUM_ROWS = 32
"""Rows of logits whose sums are computed at a time: they are in 64 bits, so that a draw depends on no rounding."""
SAMPLER = "canvas-philox/1"
"""Name of the contract: the same seed, choice, position and logits give the same canvas in every release with this
name."""
MAX_STEPS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Parameters of denoising, from a model's generation_config.json."""

    num_steps: int = 48
    """Maximum number of steps."""
    entropy_bound: float = 0.1
    least_temperature: float = 0.4
    """Temperature towards which the last step comes."""
    most_temperature: float = 0.8
    """Temperature of the first step."""
    num_stable: int = 1
    """Number of steps in a row whose likeliest tokens must be those of the step after them, for the canvas to end; 0:
    they may change up to the last step."""
    confidence: float = 0.005
    """The mean entropy of the canvas, in nats, must be less for the canvas to end."""

    @classmethod
    def of_folder(cls, folder: Path) -> Schedule:
        """Return the schedule of a model folder.

        Raises:
            ModelLoadError: a value is outside its range, or the sampler is another one.
        """
        said = read_json(folder / "generation_config.json")
        sampler = said.get("sampler_config") or {}
        if not isinstance(sampler, dict) or sampler.get("_cls_name", "EntropyBoundSamplerConfig") != (
            "EntropyBoundSamplerConfig"
        ):
            raise ModelLoadError(f"generation_config.json in {folder} has a sampler_config that is not supported")
        found = cls()
        for name, value in {
            "num_steps": said.get("max_denoising_steps"),
            "entropy_bound": sampler.get("entropy_bound"),
            "least_temperature": said.get("t_min"),
            "most_temperature": said.get("t_max"),
            "num_stable": said.get("stability_threshold"),
            "confidence": said.get("confidence_threshold"),
        }.items():
            if value is None:
                continue
            is_whole = name in ("num_steps", "num_stable")
            is_number = isinstance(value, int) if is_whole else isinstance(value, int | float)
            if isinstance(value, bool) or not is_number or not 0 <= value < math.inf:
                raise ModelLoadError(f"generation_config.json in {folder} has {value!r:.40} where a number must be")
            found = replace(found, **{name: value})
        if not (1 <= found.num_steps <= MAX_STEPS and found.num_stable <= found.num_steps):
            raise ModelLoadError(
                f"generation_config.json in {folder} asks for {found.num_steps} denoising steps, of which "
                f"{found.num_stable} are stable; there must be 1 to {MAX_STEPS}, and not more stable ones"
            )
        if not 0 < found.least_temperature < found.most_temperature:
            raise ModelLoadError(f"generation_config.json in {folder} must have 0 < t_min < t_max")
        return found

    def temperature(self, num_left: int) -> float:
        """Return the temperature of the step after which `num_left` - 1 steps are left."""
        return self.least_temperature + (self.most_temperature - self.least_temperature) * num_left / self.num_steps


class Noise(NamedTuple):
    """Random numbers of one step of a canvas."""

    uniform: torch.Tensor
    """`[places]` in float64, in [0, 1): decide the drawn tokens."""
    token_ids: torch.Tensor
    """`[places]`: tokens for the places that are not kept."""


class NoiseKey(NamedTuple):
    """Key of a canvas's random numbers."""

    seed: int
    choice_index: int
    position: int
    """Position of the canvas's first token in its sequence."""

    def of_step(self, step: int, num_places: int, vocab_size: int) -> Noise:
        """Return the numbers of one step, on the CPU; step 0 gives the tokens from which the canvas starts.

        They are the raw output of Philox4x64-10 (Salmon et al., 2011), which NumPy does not change.
        """
        parts = ((self.seed % 2**64, 8), (self.choice_index, 4), (self.position, 8), (step, 4))
        counter = b"".join(number.to_bytes(size, "little") for number, size in parts)
        key = int.from_bytes(hashlib.blake2b(counter, digest_size=16, person=b"baton-canvas").digest(), "little")
        raw = np.random.Philox(key=key).random_raw(2 * num_places)
        uniform = torch.from_numpy((raw[:num_places] >> np.uint64(11)).astype(np.float64) * 2.0**-53)
        return Noise(uniform, torch.from_numpy((raw[num_places:] % np.uint64(vocab_size)).astype(np.int64)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """A canvas between two steps."""

    key: NoiseKey
    token_ids: torch.Tensor
    """`[places]`: the tokens that the model sees in the next step."""
    num_left: int
    """Steps that may follow."""
    is_drawn: bool
    """False if the likeliest token of each place is kept instead of a drawn one (temperature 0)."""
    likeliest: tuple[torch.Tensor, ...] = ()
    """`[places]`: the likeliest tokens of the last steps, at most `Schedule.num_stable` of them."""
    conditioning: torch.Tensor | None = None
    """`[places, hidden]`: mean embedding of each place after the last step, by its probabilities; None: there was no
    step."""
    is_finished: bool = False

    @property
    def result(self) -> tuple[int, ...]:
        """The tokens of a finished canvas."""
        return tuple(self.likeliest[-1].tolist())

    def denoised(self, logits: torch.Tensor, schedule: Schedule) -> Canvas:
        """Return the canvas after a step.

        Args:
            logits: `[places, vocabulary]` in float32, divided by the temperature of the step.
        """
        num_places, vocab_size = logits.shape
        noise = self.key.of_step(1 + schedule.num_steps - self.num_left, num_places, vocab_size)
        likeliest, entropy = logits.argmax(-1), entropies(logits)
        drawn = draws(logits, noise.uniform.to(logits.device)) if self.is_drawn else likeliest
        kept = within_bound(entropy, schedule.entropy_bound)
        is_stable = not schedule.num_stable or (
            len(self.likeliest) == schedule.num_stable
            and all(torch.equal(likeliest, before) for before in self.likeliest)
        )
        is_finished = self.num_left == 1 or (is_stable and float(entropy.mean()) < schedule.confidence)
        return replace(
            self,
            token_ids=torch.where(kept, drawn, noise.token_ids.to(logits.device)),
            num_left=self.num_left - 1,
            likeliest=(*self.likeliest, likeliest)[-max(1, schedule.num_stable) :],
            is_finished=is_finished,
        )


def entropies(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each row of logits in nats, `[rows]`."""
    logarithms = logits.log_softmax(-1)
    return -(logarithms.exp() * logarithms).sum(-1)


def within_bound(entropy: torch.Tensor, bound: float) -> torch.Tensor:
    """Return which places are kept: in ascending order of entropy, while the sum of those before is within the bound.

    Args:
        entropy: `[places]`.

    Returns:
        `[places]` of booleans. At least one place is kept.
    """
    rising, order = entropy.sort(stable=True)
    kept = torch.zeros_like(entropy, dtype=torch.bool)
    return kept.scatter(0, order, rising.cumsum(0) - rising <= bound)


def draws(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return a token for each row of logits by inverse transform sampling, `[rows]`.

    Args:
        logits: `[rows, vocabulary]`.
        uniform: `[rows]` in float64, in [0, 1).
    """
    found = []
    for begin in range(0, len(logits), NUM_ROWS):
        rows = slice(begin, begin + NUM_ROWS)
        sums = logits[rows].softmax(-1).double().cumsum(-1)
        places = torch.searchsorted(sums, (uniform[rows] * sums[:, -1])[:, None], right=True)[:, 0]
        found.append(places.clamp_(max=logits.shape[1] - 1))
    return torch.cat(found)
