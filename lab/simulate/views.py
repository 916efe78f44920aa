"""Views of a pool's workers for one request: each is taken when it is read, because a pool may have thousands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from lab.simulate.policy import WorkerView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lab.simulate.members import Members
    from lab.simulate.worker import SimulatedWorker
    from lab.traces.trace import TraceRequest


class PoolViews(Sequence[WorkerView]):
    """Ready workers of a role, as a policy sees them when a request is placed.

    Args:
        workers: the workers, in order of index; the same list until the pool changes.
        keys: those of the request's full blocks.
        members: all workers, with a mirror.
    """

    def __init__(
        self,
        workers: Sequence[SimulatedWorker],
        request: TraceRequest,
        keys: Sequence[bytes],
        members: Members,
    ) -> None:
        self.workers = workers
        self._members = members
        self._request = request
        self._keys = keys

    def __len__(self) -> int:
        return len(self.workers)

    @overload
    def __getitem__(self, index: int) -> WorkerView: ...

    @overload
    def __getitem__(self, index: slice) -> list[WorkerView]: ...

    def __getitem__(self, index: int | slice) -> WorkerView | list[WorkerView]:
        if isinstance(index, slice):
            return [worker.view(self._keys, self._request) for worker in self.workers[index]]
        return self.workers[index].view(self._keys, self._request)

    def num_cached_tokens(self, index: int) -> int:
        """Return how many leading tokens of the prompt a worker holds."""
        worker = self._members.worker(index)
        return worker.num_cached_tokens(self._keys, self._request.num_prompt_tokens)

    def lookup(self) -> Mapping[str, int]:
        """Return the workers of all pools that hold a prefix of the prompt, by the number of its blocks."""
        shape = self.workers[0].shape
        num_usable = (self._request.num_prompt_tokens - 1) // shape.block_tokens
        assert self._members.mirror is not None
        return self._members.mirror.lookup(self._keys[:num_usable], resumes_anywhere=shape.spec.resumes_anywhere)
