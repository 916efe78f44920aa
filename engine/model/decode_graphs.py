"""Decode steps as CUDA graphs: one launch in place of a thousand.

A graph does over and over what was launched once while it was captured, with the same memory. So all that a step
differs in lies in buffers of the graph: the tokens, their positions, and what the kernels want to know of them. Block
tables are where all steps have them (`table_rows`), and a graph is given their rows.

There are graphs for a few numbers of sequences. The tokens of one that are too many are nobody's (`kernels`): they
write no KV, see no key, and their logits are left out. No block is kept for them.

Steps of one token a sequence are graphs, whatever they sample by, since that comes behind them. Readers get one fence,
behind the last layer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from baton.errors import in_one_line
from engine.core.runner import OnLayerDone, StepPart
from engine.model.attention import report_written, set_step
from engine.model.attention_step import Attention
from engine.model.kernel_attention import KernelAttention, KernelStep
from engine.model.last_tokens import Filling
from engine.model.rank_step import RankStep
from engine.uploads import StepNumbers

logger = logging.getLogger(__name__)
NUM_WARM_UPS = 2
"""Runs before a capture: what libraries set up when they are first used must not be captured."""


def graph_sizes(most: int) -> tuple[int, ...]:
    """Returns the numbers of sequences there are graphs for, ascending, of which the last holds `most`.

    At most a quarter of a large one is padding. Each takes time at the start, and keeps its rows of logits.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(8, 2 ** (sizes[-1].bit_length() - 3)))
    return tuple(sizes[: 1 + next(place for place, size in enumerate(sizes) if size >= most)])


def graph_size(step: RankStep, sizes: Sequence[int]) -> int | None:
    """Returns the size of the smallest graph that computes a step; None: none does.

    Every part has to be one known token and to sample, and nobody may ask for the scores of a prompt.
    """
    is_plain = all(len(part.token_ids) == 1 for part in step.parts) and not any(step.num_scored)
    if not is_plain or list(step.sampling) != list(range(len(step.parts))):
        return None
    return next((size for size in sizes if size >= len(step.parts)), None)


def padded_numbers(parts: Sequence[StepPart], rows: Sequence[int], size: int) -> torch.Tensor:
    """Returns what a graph of some size is given of a step, `[8, size]` on the CPU.

    Its rows are token ids, positions, and `rows` and `places` of `kernels`; the last four are its `tiles`.

    Args:
        rows: of the block tables, of each part.
    """
    padding = size - len(parts)
    token_ids = [part.token_ids[-1] for part in parts] + [0] * padding
    positions = [part.num_computed_tokens for part in parts]
    places = positions + [-1] * padding
    rows = [*rows, *[0] * padding]
    tiles = [number for token, at in enumerate(zip(rows, places, strict=True)) for number in (at[0], token, 1, at[1])]
    return torch.tensor([*token_ids, *positions, *[0] * padding, *rows, *places, *tiles]).view(8, size)


class Replayable(Protocol):
    """What a capture yields. A `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None:
        """Launches what was captured once more."""


Capture = Callable[[Callable[[], torch.Tensor]], tuple[Replayable, torch.Tensor]]
"""Runs a function, and returns what does the same again, with the tensor into which that puts its result."""


class CudaCapture:
    """A `Capture` on a GPU. Graphs share the memory of what they compute on the way, as one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Replayable, torch.Tensor]:
        stream = _warm_up_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads ask the GPU meanwhile, such as NCCL's for events, is no part of it, nor an error.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            found = run()
        self._pool = graph.pool()
        return graph, found


@functools.cache
def _warm_up_stream(device: torch.device) -> Any:
    """The stream on which all graphs of a process are tried: a library may keep memory for each one that it has seen,
    and of a device's few streams others need theirs.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Graph(NamedTuple):
    numbers: torch.Tensor
    """What it reads; see `padded_numbers`."""
    logits: torch.Tensor
    """`[size, vocabulary]`: what it writes."""
    captured: Replayable
    step: KernelStep


class DecodeGraphs:
    """The graphs of a rank, all captured when it is made.

    Args:
        model: transformers' model, with this rank's attention.
        attention: the rank's.
        capture: see `Capture`.
    """

    def __init__(self, model: Any, attention: KernelAttention, capture: Capture) -> None:
        self._model, self._attention = model, attention
        self._cache = attention.cache
        self.sizes = graph_sizes(attention.rows.num_rows)
        self._graphs = {size: self._captured(size, capture) for size in reversed(self.sizes)}

    @torch.inference_mode()
    def compute(
        self, step: RankStep, on_layer_done: OnLayerDone, filling: Filling | None, numbers: StepNumbers
    ) -> torch.Tensor | None:
        """Computes a step whose copies have been performed; see `ModelRank.compute`.

        Returns:
            `[parts, vocabulary]`, to be read before the next step is launched; None: there is no graph for it.
        """
        size = graph_size(step, self.sizes)
        if size is None:
            return None
        graph = self._graphs[size]
        rows = self._attention.rows.of(step.parts, numbers)
        given = numbers.put(padded_numbers(step.parts, rows, size))
        filling = None if filling is None else filling.put_by(numbers)
        numbers.send()
        graph.numbers.copy_(given)
        if filling is not None:
            filling.fill(graph.numbers[0])
        if graph.step.decoded is not None:
            graph.step.decoded.prepare(step.parts, rows)
        graph.captured.replay()
        report_written(self._cache, self._cache.spec.num_layers - 1, on_layer_done)
        return graph.logits[: len(step.parts)]

    @torch.inference_mode()
    def _captured(self, size: int, capture: Capture) -> _Graph:
        numbers = padded_numbers([], [], size).to(self._cache.device)
        token_ids, positions = numbers[:2]
        step = self._attention.graph_step(numbers[2:])

        def run() -> torch.Tensor:
            set_step(step)
            logits: torch.Tensor = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False
            ).logits[0]  # fmt: skip
            return logits

        captured, logits = capture(run)
        return _Graph(numbers, logits, captured, step)


def graphs_of(model: Any, attention: Attention, capture: Capture | None = None) -> DecodeGraphs | str:
    """Returns a rank's graphs, or why there are none, and logs it; arguments are those of `DecodeGraphs`."""
    assert isinstance(attention, KernelAttention)
    if (kind := model.config.rope_parameters["rope_type"]) in ("dynamic", "longrope"):
        reason = f"with RoPE of type {kind} the host looks at the positions"
        logger.info("decode steps are no CUDA graphs: %s", reason)
        return reason
    try:
        graphs = DecodeGraphs(model, attention, capture or CudaCapture(attention.cache.device))
    except Exception as error:  # the model's own code, which may look at what it computes
        reason = f"one cannot be captured: {in_one_line(error)}"
        logger.warning("decode steps are no CUDA graphs: %s", reason)
        return reason
    logger.info("decode steps of up to %d sequences are CUDA graphs", graphs.sizes[-1])
    return graphs
