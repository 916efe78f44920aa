"""Races between the streams of fake GPUs, found by torch's own sanitizer: what is read or written on one stream, and
was written on another one, whose work nothing has waited for.

torch's sanitizer watches tensors of a GPU; here those that a test names are watched, by their storage, on whatever
stream of a fake GPU is the thread's own. The moment does not matter: an access is a race even where it came in time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.cuda._sanitizer import EventHandler, UnsynchronizedAccessError
from torch.utils._python_dispatch import TorchDispatchMode


class Races:
    """What was found.

    Attributes:
        found: one line for each race.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._handler = EventHandler()
        self._lock = threading.Lock()
        self._events = itertools.count(1)
        self._watched: dict[int, str] = {}

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage().data_ptr()
        self._watched[storage] = name
        self._handler._handle_memory_allocation(storage)

    def record(self, stream: int) -> int:
        """A new event, at the end of what is in the stream."""
        with self._lock:
            event = next(self._events)
            self._handler._handle_event_creation(event)
            self._handler._handle_event_record(event, stream)
            return event

    def wait(self, event: int, stream: int) -> None:
        with self._lock:
            self._handler._handle_event_wait(event, stream)

    def happen(self, event: int) -> None:
        """The host has seen it, and so has all that it does later."""
        with self._lock:
            self._handler._handle_event_synchronization(event)

    def access(self, what: str, stream: int, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        written, read = self._storages(writes), self._storages(reads)
        with self._lock:
            errors = self._handler._handle_kernel_launch(
                stream, read - written, written, set(), what, self._aliases(read | written)
            )
        for error in errors:
            assert isinstance(error, UnsynchronizedAccessError)
            name = self._watched[error.data_ptr]
            self.found.append(f"{what} on {stream} of {name}: {error.previous_access.operator}")

    def _aliases(self, storages: set[int]) -> dict[int, list[str]]:
        return {storage: [self._watched[storage]] for storage in storages}

    def _storages(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        found = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return found & self._watched.keys()


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches what torch computes in the thread that enters it, on the fake stream that is its own."""

    def __init__(self, races: Races, gpu: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._races = races
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        named = [*zip(func._schema.arguments, args, strict=False)]
        named += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
        if not func.is_view:
            for argument, value in named:
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(each, torch.Tensor):
                        (writes if is_written else reads).append(each)
            self._races.access(str(func), self._gpu.current_stream().cuda_stream, reads, writes)
        return func(*args, **kwargs)
