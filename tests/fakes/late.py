"""A GPU that is late: what is put into its streams is done when somebody waits for it, and not a moment before.

So a wait that is missing gives wrong bytes at once, in any test that compares bytes. `tests.fakes.races` finds a
missing wait by the order of what was done; this finds it by what came out.

at once    work on memory of the host, views, and the shape of results
late       work that reads or writes memory of the GPU, in the order of the stream that is the thread's own; a result
           has junk in it until then
waits      a query or a wait of an event, the end of a stream, and what brings a number to the host: the stream runs as
           far as it can, and with it each stream that it waits for
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    from tests.fakes.gpu import FakeGpu

JUNK = 0xA5
HOST_READS = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default")


class LateHardware:
    """A stream without a thread: whoever waits for it does its work."""

    def __init__(self, gpu: FakeGpu, handle: int) -> None:
        self.gpu = gpu
        self.handle = handle
        self._jobs: deque[Callable[[], bool]] = deque()
        self._lock = threading.Lock()

    def put(self, job: Callable[[], object]) -> None:
        def once() -> bool:
            job()
            return True

        self._jobs.append(once)

    def put_until(self, happened: Callable[[], bool], then: Callable[[], object] = lambda: None) -> None:
        def when_it_has() -> bool:
            if not happened():
                return False
            then()
            return True

        self._jobs.append(when_it_has)

    def drive(self) -> None:
        """Works as far as possible, unless another thread does."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            with _disable_current_modes():
                while self._jobs and self._jobs[0]():
                    self._jobs.popleft()
        finally:
            self._lock.release()

    def end(self) -> None:
        self._jobs.clear()


class Memory:
    """The memory of a late GPU. It is never given back: an address must not become another thing's."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages


class Late(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts off what the thread that enters it computes in the memory of a GPU."""

    def __init__(self, memory: Memory, hardware: LateHardware) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._hardware = hardware

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, torch.Tensor)]
        with _disable_current_modes():
            if func.is_view or not any(map(self._memory.has, given)):
                return func(*args, **kwargs)
            if str(func) in HOST_READS:
                self._hardware.drive()
                return func(*args, **kwargs)
            if func._schema.is_mutable:
                self._hardware.put(lambda: func(*args, **kwargs))
                return args[0] if func._schema.arguments[0].alias_info else kwargs["out"]
            result = func(*args, **kwargs)
            self._memory.own(result).view(-1).view(torch.uint8).fill_(JUNK)
            self._hardware.put(lambda: result.copy_(func(*args, **kwargs)))
            return result


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
