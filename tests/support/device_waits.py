"""Sees where a host would wait for a device, on a machine without one.

The device is torch's `meta`, whose tensors have a shape and no values. What the host wants to see of them fails, and
what it gives them passes by here, as operations or as calls whose numbers torch copies without an operation.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import uploads

DEVICE = torch.device("meta")
SEEN_BY_THE_HOST = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "equal"})
OF_NUMBERS = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})
INDEXING = frozenset({"__getitem__", "__setitem__"})


class Waits(contextlib.ExitStack):
    """Notes each operation that waits for the device while the context lasts, and counts the copies to it that do not.

    Attributes:
        found: names of what waits.
        num_copies: copies from the host to the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        self.num_copies = 0
        self._pinned: list[torch.Tensor] = []
        """All that there ever was, so that no memory is met twice."""
        self._sent: set[int] = set()
        monkeypatch.setattr(uploads, "_pinned", self._pin)

    def __enter__(self) -> Waits:
        super().__enter__()
        self.enter_context(_Calls(self))
        self.enter_context(_Operations(self))
        return self

    def copied(self, source: torch.Tensor, *, is_waited_for: bool) -> None:
        """Notes a copy to the device."""
        place = source.untyped_storage().data_ptr()
        is_pinned = any(place == pinned.untyped_storage().data_ptr() for pinned in self._pinned)
        if is_waited_for or not is_pinned:
            self.found.append(f"a copy of {tuple(source.shape)}, pinned: {is_pinned}, waited for: {is_waited_for}")
        self.num_copies += 1
        self._sent.add(place)

    def written(self, target: torch.Tensor) -> None:
        """Notes a copy within the host."""
        if target.numel() and target.untyped_storage().data_ptr() in self._sent:
            self.found.append("written over what may not have been sent yet")

    def _pin(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        self._pinned.append(torch.empty(size, dtype=dtype))
        return self._pinned[-1]


class _Calls(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        makes = name in OF_NUMBERS and not isinstance(args[-1], torch.Tensor) and _is_there(kwargs.get("device"))
        if makes or (name in INDEXING and _is_there(args[0].device) and _has_list(args[1])):
            self._waits.found.append(f"numbers of the host in {name}")
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, waits: Waits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        with self:  # in inference mode an operation that is made of others comes whole
            if (found := func.decompose(*args, **kwargs)) is not NotImplemented:
                return found
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_there = [_is_there(tensor.device) for tensor in tensors]
        if name == "_to_copy" and _is_there(kwargs.get("device")) and not is_there[0]:
            self._waits.copied(args[0], is_waited_for=not kwargs.get("non_blocking"))
        elif name == "copy_" and is_there[0] and not is_there[1]:
            self._waits.copied(args[1], is_waited_for=args[2:] != (True,) and not kwargs.get("non_blocking"))
        elif name == "copy_" and not any(is_there):
            self._waits.written(args[0])
        elif any(is_there) and (name in SEEN_BY_THE_HOST or _is_mixed(tensors) or _goes_back(name, kwargs)):
            self._waits.found.append(name)
        return func(*args, **kwargs)


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device) == DEVICE


def _has_list(index: Any) -> bool:
    return any(isinstance(each, list) for each in (index if isinstance(index, tuple) else (index,)))


def _is_mixed(tensors: list[torch.Tensor]) -> bool:
    """Returns whether an operation brings tensors of the host to the device by itself. Single values need no copy."""
    return any(not _is_there(tensor.device) and tensor.dim() for tensor in tensors)


def _goes_back(name: str, kwargs: dict[str, Any]) -> bool:
    return name == "_to_copy" and kwargs.get("device") == torch.device("cpu")
