"""Costs of simulated workers: steps as in `baton.costs`, KV transfers, and the overhead of a request.

They are calculated for known GPUs, or read from the measurements of `baton bench --json`.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from baton.costs import StepCosts
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from baton.costs import StepSize


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs of one worker."""

    steps: StepCosts
    transfer_latency_s: float
    transfer_s_per_token: float
    transfer_s_per_window_token: float = 0.0
    """Seconds per token of the layers with a window, of which only the window is transferred."""
    transfer_s_per_state: float = 0.0
    prefill_steps: StepCosts | None = None
    """Costs of a prefill worker's steps, if they differ."""
    request_overhead_s: float = 0.0
    """Time of a first token other than waiting and computing: calls, placement, reading and writing tokens."""
    prompt_step_s: float = 0.0
    """Additional time of a decode worker's step with a prompt; `steps` has the same overhead for steps with and without
    a prompt."""
    decoding_s: tuple[tuple[int, float], ...] = ()
    """Additional time of decoding beyond `steps`, which is linear in sequences: `(sequences, seconds)` for ascending
    numbers of sequences, interpolated between them. Seconds may be negative, but a step takes at least a quarter of
    the time in `steps`."""

    def transfer_s(self, num_tokens: int, num_window_tokens: int = 0) -> float:
        """Return the time from the first byte of a prompt's KV to the commit."""
        tokens_s = self.transfer_s_per_token * num_tokens + self.transfer_s_per_window_token * num_window_tokens
        return self.transfer_latency_s + tokens_s + self.transfer_s_per_state

    def with_layers(self, full_share: float, window: int, state_tokens: float) -> CostModel:
        """Return the costs of a model of the same size, of which some layers have windows or states.

        Args:
            full_share: share of a token's KV and attention in layers without a window.
            window: tokens to which the other layers attend; 0: they have no KV. Sequences that are shorter than the
                window cost as much.
            state_tokens: size of a sequence's states, as a number of tokens with as much KV in all layers.
        """
        steps, others = self.steps, 1 - full_share
        read = others * window + 2 * state_tokens  # a state is read and written
        return replace(
            self,
            steps=replace(
                steps,
                s_per_token=steps.s_per_token + steps.s_per_pair * others * window,
                s_per_pair=steps.s_per_pair * full_share,
                s_per_sequence=steps.s_per_sequence + steps.s_per_kv_token * read,
                s_per_kv_token=steps.s_per_kv_token * full_share,
            ),
            transfer_s_per_token=self.transfer_s_per_token * full_share,
            transfer_s_per_window_token=self.transfer_s_per_token * others,
            transfer_s_per_state=self.transfer_s_per_token * state_tokens,
        )

    def of_prefill(self) -> CostModel:
        """Return the costs of a prefill worker, all of whose steps contain prompts."""
        return replace(self, steps=self.prefill_steps or self.steps, prompt_step_s=0.0, decoding_s=())

    def step_s(self, size: StepSize) -> float:
        """Return the duration of one step."""
        step_s = self.steps.step_s(size.num_new, size.num_pairs, size.num_decoding, size.num_kv_tokens)
        if size.num_decoding and self.decoding_s:
            step_s = max(step_s / 4, step_s + interpolated(self.decoding_s, size.num_decoding))
        return step_s + self.prompt_step_s if size.num_new > size.num_decoding else step_s

    def as_dict(self) -> dict[str, Any]:
        """Return a part of the document that `read_bench` reads."""
        return asdict(self)

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second of short prompts, at full speed. A fit to few prompts may yield infinity."""
        return 1 / max(self.steps.s_per_token, 1e-9)


def interpolated(points: Sequence[tuple[int, float]], x: int) -> float:
    """Interpolate linearly between `points`, in ascending order; constant beyond both ends."""
    above = bisect.bisect_left(points, x, key=lambda point: point[0])
    if above == 0 or above == len(points):
        return points[min(above, len(points) - 1)][1]
    (left, low), (right, high) = points[above - 1], points[above]
    return low + (high - low) * (x - left) / (right - left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """An accelerator: the dense figures of its data sheet, and the share of them that serving engines reach."""

    flops: float
    bytes_per_s: float
    network_bytes_per_s: float
    compute_share: float = 0.5
    memory_share: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A dense decoder with grouped-query attention."""

    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_param: float = 2.0
    bytes_per_kv: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv


GPUS = {
    "h200": Gpu(flops=989e12, bytes_per_s=4.8e12, network_bytes_per_s=50e9),
    "h100": Gpu(flops=989e12, bytes_per_s=3.35e12, network_bytes_per_s=50e9),
    "a100": Gpu(flops=312e12, bytes_per_s=2.04e12, network_bytes_per_s=25e9),
}
"""bfloat16 without sparsity; SXM boards; one 400 (200) Gbit/s network card a GPU."""
MODELS = {
    "llama-3-8b": Model(num_params=8.03e9, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128),
    "llama-3-70b": Model(num_params=70.6e9, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128),
}


def roofline(model: Model, gpu: Gpu, num_gpus: int = 1) -> CostModel:
    """Return the costs of a worker of `num_gpus` GPUs that share the model's tensors evenly.

    A token costs 2 operations per parameter, and 4 per head dimension for each token that it attends to (queries with
    keys, and the weighted sum of values). A step reads all weights once, and the KV of every decoding context. The
    overhead of 0.5 ms is the cost of scheduling and launching in engines that overlap both.
    """
    flops = gpu.flops * gpu.compute_share * num_gpus
    bytes_per_s = gpu.bytes_per_s * gpu.memory_share * num_gpus
    steps = StepCosts(
        s_overhead=0.5e-3,
        s_per_token=2 * model.num_params / flops,
        s_per_pair=4 * model.num_layers * model.num_heads * model.head_dim / flops,
        s_weights=model.num_params * model.bytes_per_param / bytes_per_s,
        s_per_sequence=0.0,
        s_per_kv_token=model.kv_bytes_per_token / bytes_per_s,
    )
    return CostModel(
        steps=steps,
        transfer_latency_s=2e-3,
        transfer_s_per_token=model.kv_bytes_per_token / (gpu.network_bytes_per_s * num_gpus),
    )


PROFILES = {
    "llama-3-8b@h200": roofline(MODELS["llama-3-8b"], GPUS["h200"]),
    "llama-3-8b@a100": roofline(MODELS["llama-3-8b"], GPUS["a100"]),
    "llama-3-70b@4xh200": roofline(MODELS["llama-3-70b"], GPUS["h200"], 4),
    "llama-3-70b@8xa100": roofline(MODELS["llama-3-70b"], GPUS["a100"], 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The part of `baton bench --json` that describes a cluster's workers."""

    costs: CostModel
    num_blocks: int
    block_tokens: int
    chunk_tokens: int
    max_model_len: int

    def as_dict(self) -> dict[str, Any]:
        """Return a part of the document; `read_bench` reads it."""
        worker = {name: getattr(self, name) for name in WORKER_FIELDS}
        return {"costs": self.costs.as_dict(), "worker": worker}


WORKER_FIELDS = ("num_blocks", "block_tokens", "chunk_tokens", "max_model_len")


def read_bench(path: Path) -> Bench:
    """Read the file. Raise ConfigError if it was not written by `baton bench --json`, or has no costs."""
    try:
        document = json.loads(path.read_text())
        costs, worker = dict(document["costs"]), document["worker"]
        steps = _steps(costs.pop("steps"))
        prefill_steps = costs.pop("prefill_steps")
        model = CostModel(
            steps=steps,
            decoding_s=_points(costs.pop("decoding_s", [])),
            prefill_steps=_steps(prefill_steps) if prefill_steps else None,
            **_numbers(costs, CostModel),
        )
        return Bench(costs=model, **{name: int(worker[name]) for name in WORKER_FIELDS})
    except OSError as error:
        raise ConfigError(f"cannot read the costs {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} has no costs as `baton bench --json` writes them ({type(error).__name__}: {error}); the router "
            "reports workers' costs only to its operators"
        ) from error


def _steps(values: dict[str, Any]) -> StepCosts:
    return StepCosts(**_numbers(values, StepCosts))


def _points(values: list[list[float]]) -> tuple[tuple[int, float], ...]:
    """Return the points of `decoding_s`. Raise ValueError unless they are pairs with ascending numbers of sequences."""
    points = tuple((int(number), float(seconds)) for number, seconds in values)
    rises = all(first < second for (first, _), (second, _) in itertools.pairwise(points))
    if not rises or not all(math.isfinite(seconds) for _, seconds in points):
        raise ValueError(f"decoding_s is {values!r}")
    return points


def _numbers(values: dict[str, Any], cls: type[StepCosts | CostModel]) -> dict[str, float]:
    """Return the fields of `cls`. Raise ValueError for an unknown field, or a value that cannot be a cost."""
    names = {field.name for field in fields(cls)}
    for name, value in values.items():
        if name not in names or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}")
    return {name: float(value) for name, value in values.items()}
