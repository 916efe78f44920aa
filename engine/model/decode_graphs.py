"""CUDA graphs of decode steps: one launch instead of a thousand.

A graph repeats the launches that were captured, with the same memory. So everything that differs between steps is in
buffers of the graph: the tokens, their positions, and the numbers for the kernels. Block tables are where all steps
have them (`table_rows`), and a graph receives their row numbers.

There are graphs for a few numbers of sequences. Surplus tokens of a graph are padding (`kernels`): they write no KV,
see no key, and their logits are ignored. They have no blocks.

All steps with one token per sequence are graphs, whatever their sampling, since sampling comes after the graph. Readers
get one fence, after the last layer.
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
from engine.model.rank_step import Filling, RankStep
from engine.model.shapes import FIXED_LENGTH, ropes_of
from engine.uploads import StepNumbers

logger = logging.getLogger(__name__)
NUM_WARM_UPS = 2
"""Runs before a capture: the one-time initialization of libraries must not be captured."""


def graph_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of sequences for which there are graphs, ascending; the last one holds `most`.

    At most a quarter of a large graph is padding. Each graph takes time at the start, and keeps its rows of logits.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(8, 2 ** (sizes[-1].bit_length() - 3)))
    return tuple(sizes[: 1 + next(place for place, size in enumerate(sizes) if size >= most)])


def graph_size(step: RankStep, sizes: Sequence[int]) -> int | None:
    """Return the size of the smallest graph that computes a step; None: there is none.

    Every part must be one known token and sample, and no part may request scores of its prompt.
    """
    is_plain = all(len(part.token_ids) == 1 for part in step.parts) and not any(step.num_scored)
    if not is_plain or list(step.sampling) != list(range(len(step.parts))):
        return None
    return next((size for size in sizes if size >= len(step.parts)), None)


def padded_numbers(
    parts: Sequence[StepPart], rows: Sequence[int], size: int, positions: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the input numbers of a graph for a step, `[8, size]` on the CPU.

    Its rows are token ids, positions, and `rows` and `places` of `kernels`; the last four are its `tiles`.

    Args:
        rows: row of the block tables for each part.
        positions: position of each part's token for RoPE; None: its place in the sequence.
    """
    padding = size - len(parts)
    token_ids = [part.token_ids[-1] for part in parts] + [0] * padding
    places = [part.num_computed_tokens for part in parts]
    positions = places if positions is None else positions
    places = places + [-1] * padding
    rows = [*rows, *[0] * padding]
    tiles = [number for token, at in enumerate(zip(rows, places, strict=True)) for number in (at[0], token, 1, at[1])]
    return torch.tensor([*token_ids, *positions, *[0] * padding, *rows, *places, *tiles]).view(8, size)


class Replayable(Protocol):
    """Result of a capture. A `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None:
        """Launch the captured work once more."""


Capture = Callable[[Callable[[], torch.Tensor]], tuple[Replayable, torch.Tensor]]
"""Runs a function, and returns a replayable copy of its work with the tensor that receives its result."""


class CudaCapture:
    """`Capture` on a GPU. Graphs share the memory of their intermediate results, as only one runs at a time."""

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
        # Calls of other threads to the GPU, such as NCCL's for events, are neither captured nor an error.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            found = run()
        self._pool = graph.pool()
        return graph, found


@functools.cache
def _warm_up_stream(device: torch.device) -> Any:
    """Return the stream on which all graphs of a process are warmed up.

    A library may keep memory for each stream that it has seen, and a device has only few streams.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Graph(NamedTuple):
    numbers: torch.Tensor
    """Input of the graph; see `padded_numbers`."""
    logits: torch.Tensor
    """Output of the graph, `[size, vocabulary]`."""
    captured: Replayable
    step: KernelStep


class DecodeGraphs:
    """Graphs of a rank, all captured at construction.

    Args:
        model: transformers' model, with this rank's attention.
        attention: the rank's attention.
        capture: see `Capture`.
    """

    def __init__(self, model: Any, attention: KernelAttention, capture: Capture) -> None:
        self._model, self._attention = model, attention
        self._cache = attention.cache
        self.sizes = graph_sizes(attention.rows.num_rows)
        self._graphs = {size: self._captured(size, capture) for size in reversed(self.sizes)}

    @torch.inference_mode()
    def compute(
        self,
        step: RankStep,
        on_layer_done: OnLayerDone,
        filling: Filling | None,
        numbers: StepNumbers,
        positions: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        """Compute a step whose copies have been performed; see `ModelRank.compute`.

        Args:
            positions: see `padded_numbers`.

        Returns:
            `[parts, vocabulary]`, to be read before the next step is launched; None: no graph fits the step.
        """
        size = graph_size(step, self.sizes)
        if size is None:
            return None
        graph = self._graphs[size]
        rows = self._attention.rows.of(step.parts, numbers)
        given = numbers.put(padded_numbers(step.parts, rows, size, positions))
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
    """Return a rank's graphs, or the reason why there are none, and log it. Arguments as for `DecodeGraphs`."""
    assert isinstance(attention, KernelAttention)
    kinds = {rope.get("rope_type") for rope in ropes_of(model.config.get_text_config(decoder=True))}
    if kind := next((kind for kind in FIXED_LENGTH if kind in kinds), None):
        reason = f"with RoPE of type {kind} the host looks at the positions"
        logger.info("decode steps are no CUDA graphs: %s", reason)
        return reason
    try:
        graphs = DecodeGraphs(model, attention, capture or CudaCapture(attention.cache.device))
    except Exception as error:  # the model's own code, which may synchronize with the host
        reason = f"one cannot be captured: {in_one_line(error)}"
        logger.warning("decode steps are no CUDA graphs: %s", reason)
        return reason
    logger.info("decode steps of up to %d sequences are CUDA graphs", graphs.sizes[-1])
    return graphs
