"""What this machine could do: memory bandwidth, oneDNN's rate at the model's shapes, and the share that we reach."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.core.runner import Runner
from engine.native.runner import NativeRunner
from tests.bench.engine_sides import Measured
from tests.bench.report import Table
from tests.bench.stats import Spread, spread

GEMM_ROWS = 512
READ_MIB = 512


@dataclass(frozen=True, slots=True)
class Work:
    """What steps of a model read and compute."""

    weight_bytes: int
    """Those of the layers' matrices and the head, as they are held."""
    kv_token_bytes: int
    shapes: tuple[tuple[int, int, int], ...]
    """Outputs and inputs of the layers' matrices, and how many have them."""
    head: tuple[int, int]
    num_layers: int
    query_width: int

    def decode_bytes(self, num_streams: int, num_context: float) -> float:
        return self.weight_bytes + num_streams * num_context * self.kv_token_bytes

    def linear_operations(self, num_tokens: int) -> int:
        """Those of the layers' matrices, two for a weight and token."""
        return 2 * num_tokens * sum(outputs * inputs * count for outputs, inputs, count in self.shapes)

    def attention_operations(self, num_tokens: int) -> int:
        """Each token scores and sums up those up to itself: four operations for a dimension of a query."""
        return 4 * self.num_layers * self.query_width * num_tokens * (num_tokens + 1) // 2

    def prefill_operations(self, num_tokens: int) -> int:
        """Those of a prompt of which the last token alone has logits."""
        return (
            self.linear_operations(num_tokens) + self.attention_operations(num_tokens) + 2 * self.head[0] * self.head[1]
        )


def work_of(runner: NativeRunner) -> Work:
    """Returns the work of the model that a runner holds packed."""
    model = runner._model  # nobody else needs its sizes
    head, *matrices = list(model._weights.matrices)
    shapes = Counter((matrix.num_outputs, matrix.num_inputs) for matrix in matrices)
    what, spec = model.description, runner.cache.spec
    return Work(
        weight_bytes=sum(matrix.num_bytes for matrix in (head, *matrices)),
        kv_token_bytes=spec.block_bytes // spec.groups[0].block_size,
        shapes=tuple((*shape, count) for shape, count in sorted(shapes.items())),
        head=(head.num_outputs, head.num_inputs),
        num_layers=what.num_layers,
        query_width=what.num_heads * what.head_dim,
    )


def read_bytes_per_s(num_tries: int) -> Spread:
    """One thread sums up an array that no cache holds."""
    array = torch.ones(READ_MIB << 18)
    rates = []
    for _ in range(num_tries):
        start = time.perf_counter()
        array.sum()
        rates.append(array.nbytes / (time.perf_counter() - start))
    return spread(rates)


@torch.inference_mode()
def gemm_operations_per_s(shapes: Sequence[tuple[int, int, int]], num_tries: int) -> Spread:
    """oneDNN's float32, its weights packed before, one layer after the other as a prompt's step has them."""
    ops = torch.ops.mkldnn
    layers = [
        (torch.rand(GEMM_ROWS, inputs), ops._reorder_linear_weight(torch.rand(outputs, inputs), GEMM_ROWS))
        for outputs, inputs, count in shapes
        for _ in range(count)
    ]
    num_operations = 2 * GEMM_ROWS * sum(outputs * inputs * count for outputs, inputs, count in shapes)
    rates = []
    for _ in range(num_tries + 1):  # the first one warms up
        start = time.perf_counter()
        for rows, weight in layers:
            ops._linear_pointwise(rows, weight, None, "none", [], "")
        rates.append(num_operations / (time.perf_counter() - start))
    return spread(rates[1:])


def table(
    runner: Runner,
    decodes: Mapping[tuple[int, float], Sequence[Measured]],
    prefills: Mapping[int, Sequence[Measured]],
    quick: bool,
) -> Table:
    """Args:
    runner: the one that was measured.
    decodes: by streams and mean tokens of context.
    prefills: by tokens of the prompt.
    """
    found = Table("Roofline: this machine, one thread", ("", "work", "rate", "share", "gate"))
    if not isinstance(runner, NativeRunner):
        found.note = f"not measured: the model runs on {runner.name} here"
        return found
    work, num_tries = work_of(runner), 3 if quick else 10
    bandwidth, gemm = read_bytes_per_s(num_tries), gemm_operations_per_s(work.shapes, num_tries)
    found.rows.append(("memory, GB/s read by a sum, best counts", f"{READ_MIB} MiB", _scaled(bandwidth, 1e9), "", ""))
    shapes = ", ".join(f"{count} x {outputs}x{inputs}" for outputs, inputs, count in work.shapes)
    found.rows.append((f"oneDNN float32, {GEMM_ROWS} rows, GFLOP/s, median counts", shapes, _scaled(gemm, 1e9), "", ""))
    for (num_streams, num_context), runs in decodes.items():
        num_bytes = work.decode_bytes(num_streams, num_context)
        rates = spread([num_bytes / (run.wall_s * num_streams / run.num_tokens) for run in runs])
        found.rows.append((
            f"decode, streams: {num_streams}; GB/s",
            f"{work.weight_bytes / 1e6:.0f} + {(num_bytes - work.weight_bytes) / 1e6:.0f} MB",
            _scaled(rates, 1e9),
            _scaled(rates, bandwidth.high),
            ">= 0.6" if num_streams == 1 else "",
        ))  # fmt: skip
    for num_tokens, runs in prefills.items():
        num_operations = work.prefill_operations(num_tokens)
        rates = spread([num_operations / run.wall_s for run in runs])
        text = (
            f"{work.linear_operations(num_tokens) / 1e9:.0f} + {work.attention_operations(num_tokens) / 1e9:.0f} GFLOP"
        )
        found.rows.append(
            (f"prefill, {num_tokens} tokens; GFLOP/s", text, _scaled(rates, 1e9), _scaled(rates, gemm.median), "")
        )
    longest = max(prefills, default=0)
    if prefills and len(prefills[longest][0].chunks_s) > 2:
        found.rows += _parts(work, longest, prefills[longest], gemm)
    found.note = (
        "Bytes: weights + KV. Operations: the layers' matrices + attention. A line through the times of the longest "
        "prompt's chunks splits them into what all take alike and what grows with the tokens before (attention)."
    )
    return found


def _parts(work: Work, num_tokens: int, runs: Sequence[Measured], gemm: Spread) -> list[tuple[str | Spread, ...]]:
    """Rows of what all chunks of a prompt take alike, matrices above all, and of what grows with those before."""
    linear_rates, shares = [], []
    for run in runs:
        chunk = num_tokens / len(run.chunks_s)
        grows_s, alike_s = statistics.linear_regression(
            [chunk * (i + 0.5) for i in range(len(run.chunks_s))], run.chunks_s
        )
        linear_rates.append(work.linear_operations(num_tokens) / (alike_s * len(run.chunks_s)))
        shares.append(grows_s * num_tokens / 2 * len(run.chunks_s) / sum(run.chunks_s))
    rates = spread(linear_rates)
    return [
        ("of it what chunks take alike; GFLOP/s", "", _scaled(rates, 1e9), _scaled(rates, gemm.median), ">= 0.85"),
        (f"of {num_tokens} tokens' time, what grows with those before", "", "", spread(shares), "<= 0.2"),
    ]


def _scaled(value: Spread, by: float) -> Spread:
    return Spread(value.median / by, value.low / by, value.high / by, value.num_rounds)
