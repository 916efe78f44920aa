"""A decode step in small, for what runs beside one."""

from __future__ import annotations

import time

import torch


class DecodeStep:
    """A chain of matrix products as one CUDA graph, on a stream of its own, whose answer is known.

    To be made before any NCCL link: its watchdog's queries are not allowed while a graph is captured.
    """

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self._weights = torch.randn(16, 2048, 2048, device=device, dtype=torch.bfloat16, generator=generator) / 45
        self._input = torch.randn(8, 2048, device=device, dtype=torch.bfloat16, generator=generator)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            self._answer()  # what libraries allocate at first use must not be captured
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._output = self._answer()
        self.run()
        self._expected = self._output.clone()
        torch.cuda.synchronize()

    def run(self) -> float:
        """Seconds that it took."""
        start = time.perf_counter()
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        self._stream.synchronize()
        return time.perf_counter() - start

    def is_right(self) -> bool:
        """Of the last run."""
        with torch.cuda.stream(self._stream):
            return self._output.equal(self._expected)

    def _answer(self) -> torch.Tensor:
        hidden = self._input
        for weight in self._weights:
            hidden = torch.nn.functional.silu(hidden @ weight)
        return hidden
