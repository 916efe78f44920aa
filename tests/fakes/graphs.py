"""A CUDA graph that is none: what was launched while it was captured is done again, with the same memory.

What the host reads meanwhile fails, as it does on a GPU; what the host has given it stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.model import fused_kernels, invariant_kernels, kernels
from tests.fakes import flashinfer

SEEN_BY_THE_HOST = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "equal"})


class FakeGraph:
    """Operations and kernels in order."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for job in self.jobs:
            job()


class FakeCapture:
    """A `Capture`. All that the run leaves in memory is spoiled, since a capture computes nothing."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[FakeGraph, torch.Tensor]:
        run()  # libraries set up then what they need
        graph = FakeGraph()
        self.graphs.append(graph)
        with pytest.MonkeyPatch.context() as patch, _Recording(graph):
            for module in (kernels, fused_kernels, invariant_kernels, flashinfer):
                patch.setattr(module, "_launch", _kept(graph, module._launch))
            found = run()
        with torch.inference_mode():
            found.fill_(torch.nan)
        return graph, found


def _kept(graph: FakeGraph, launch: Callable[..., None]) -> Callable[..., None]:
    def launched(*args: Any, **options: Any) -> None:
        graph.jobs.append(lambda: launch(*args, **options))

    return launched


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode an operation that is made of others comes whole
            if (found := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return found
        if func.overloadpacket.__name__ in SEEN_BY_THE_HOST:
            raise RuntimeError("operation not permitted when stream is capturing")
        found = func(*args, **(kwargs or {}))
        kept = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]

        def again() -> None:
            new = [leaf for leaf in tree_leaves(func(*args, **(kwargs or {}))) if isinstance(leaf, torch.Tensor)]
            for there, here in zip(kept, new, strict=True):
                if there.untyped_storage().data_ptr() != here.untyped_storage().data_ptr():
                    there.copy_(here)

        self._graph.jobs.append(again)
        return found
