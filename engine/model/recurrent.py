"""Steps of models with recurrent layers, whose states are in rows of the KV cache.

Transformers' recurrent layers continue one sequence by many tokens, or many sequences by one token each. So a step of
such a model is several forward passes over its packed tokens. A segment is a part with several tokens:

    tokens   [ segment 0 | segment 1 | ... | decode 0 | decode 1 | ... ]
    passes   [   1, T    |   1, T    | ... |           B, 1            ]

A pass reads the states of its sequences from their rows, and writes them to other rows at its end. It never changes a
row that it reads, so the same step can be computed again. The states of one kind of all layers are one tensor, so a
pass takes one gather and one scatter for each kind, whatever the number of layers. If layers return new states instead
of changing the gathered ones, the new states are stacked before the scatter.

    state tensor   [row][layer][ state ]
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name the field uses
from transformers import Cache

from baton.errors import ModelLoadError
from engine.core.runner import EMPTY_PLACE, StepPart
from engine.model.kv_cache import KVCache
from engine.model.rank_step import RankStep
from engine.model.shapes import KeptStates
from engine.uploads import StepNumbers

OF_RECURRENT = "cache_params"
"""Argument by which models without attention take their cache."""


def cache_argument(model: Any) -> str:
    """Return the name by which a model takes its cache."""
    return OF_RECURRENT if OF_RECURRENT in inspect.signature(model.forward).parameters else "past_key_values"


StatePlaces = Mapping[tuple[str, int, int], tuple[str, int]]
"""Name of a state's tensor and its place among the layers there, by kind, layer and index among the layer's states."""


def places_of(kept: Sequence[KeptStates]) -> StatePlaces:
    """Return where the states of a model's layers are."""
    return {
        (each.kind, layer, index): (each.name, place)
        for each in kept
        for place, (layer, index) in enumerate(each.places)
    }


class Pass(NamedTuple):
    """One forward pass of a step."""

    parts: Sequence[StepPart]
    begin: int
    """Range of its packed tokens."""
    end: int
    is_stacked: bool
    """True if its sequences have one token each and are the rows of a batch; otherwise its tokens are one row."""


def passes_of(parts: Sequence[StepPart]) -> Iterator[Pass]:
    """Yield the passes of a step of a model with states, in packed order.

    A segment is a pass of its own. So is the first part of a new sequence, because the others in a batch have states.
    """
    end = 0
    for is_stacked, alike in groupby(parts, lambda part: len(part.token_ids) == 1 and not _is_new(part)):
        batch = list(alike)
        for each in [batch] if is_stacked else [[part] for part in batch]:
            begin, end = end, end + sum(len(part.token_ids) for part in each)
            yield Pass(each, begin, end, is_stacked)


def _is_new(part: StepPart) -> bool:
    return part.block_ids[-1][0] == EMPTY_PLACE


class Wanted(NamedTuple):
    """Rows of logits that a step wants of its passes."""

    rows: tuple[list[int], ...]
    """Rows of each pass among its own tokens, ascending."""
    order: list[int]
    """Place of each row of the result among the rows of all passes."""

    @classmethod
    def of(cls, step: RankStep, passes: Sequence[Pass]) -> Wanted:
        """Return the rows of each pass, and the order of the result."""
        wanted = step.logit_rows
        ascending = sorted(range(len(wanted)), key=wanted.__getitem__)
        rows, done = list[list[int]](), 0
        for each in passes:
            first = done
            while done < len(wanted) and wanted[ascending[done]] < each.end:
                done += 1
            rows.append([wanted[place] - each.begin for place in ascending[first:done]])
        return cls(tuple(rows), sorted(range(len(wanted)), key=ascending.__getitem__))

    def joined(self, found: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the wanted rows, given the logits of each pass. A pass without wanted rows has one unused row.

        Returns:
            `[rows or 1, vocabulary]`.
        """
        used = [logits for logits, rows in zip(found, self.rows, strict=True) if rows]
        if not used:
            return found[-1]
        logits = used[0] if len(used) == 1 else torch.cat(used)
        return logits if self.order == list(range(len(self.order))) else logits[self.order]


class StateRows(NamedTuple):
    """Rows of the states of a pass, on the device once the step's numbers have been sent."""

    read: torch.Tensor | None
    """`[sequences]`; None: the pass is of a new sequence."""
    write: torch.Tensor
    """`[sequences]`."""

    @classmethod
    def of(cls, parts: Sequence[StepPart], numbers: StepNumbers) -> StateRows:
        """Return the rows of the parts of a pass."""
        read, write = zip(*(part.block_ids[-1][:2] for part in parts), strict=True)
        return cls(None if _is_new(parts[0]) else numbers.put(torch.tensor(read)), numbers.put(torch.tensor(write)))


class PassStates(Cache):  # type: ignore[misc]
    """Transformers' cache of one pass. It holds states only: the attention function writes K and V into pages.

    Args:
        cache: the rank's cache.
        places: where the states of the model's layers are; see `places_of`.
        rows: rows of the sequences.
        num_computed_tokens: tokens before those of the pass, of its first sequence.

    Raises:
        ModelLoadError: a layer's state has another shape on this rank than in the whole model.
    """

    def __init__(self, cache: KVCache, places: StatePlaces, rows: StateRows, num_computed_tokens: int) -> None:
        super().__init__(layers=[])
        self._tensors, self._rows, self._num_computed_tokens = cache.states, rows, num_computed_tokens
        self._place = places
        read = rows.read
        self._read = {} if read is None else {name: all_.index_select(0, read) for name, all_ in cache.states.items()}
        """States before the pass, `[sequences, layers, ...]`. They are copies, which layers may change."""
        self._new: dict[str, dict[int, torch.Tensor]] = {name: {} for name in cache.states}
        """States that layers have returned instead, `[sequences, ...]`, by place."""

    def store(self) -> None:
        """Write the states after the pass."""
        for name, tensor in self._tensors.items():
            states = self._read.get(name)
            if new := self._new[name]:
                places = range(tensor.shape[1])
                states = torch.stack([new[i] if states is None or i in new else states[:, i] for i in places], dim=1)
            assert states is not None, f"no layer has a new state {name}"
            tensor.index_copy_(0, self._rows.write, states)

    def _state(self, kind: str, layer: int, index: int) -> torch.Tensor | None:
        name, place = self._place[kind, layer, index]
        return self._read[name][:, place] if self._read else None

    def _keep(self, kind: str, layer: int, index: int, state: torch.Tensor) -> torch.Tensor:
        name, place = self._place[kind, layer, index]
        tensor = self._tensors[name]
        if state.shape[1:] != tensor.shape[2:]:
            raise ModelLoadError(
                f"layer {layer} keeps a state of shape {list(state.shape[1:])} instead of {list(tensor.shape[2:])}: "
                "transformers divides it among ranks; set engine.tensor_parallel to 1"
            )
        self._new[name][place] = state = state.to(tensor.dtype)
        return state

    # -- transformers' interface ---------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._state("conv", layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        name, _ = self._place["conv", layer_idx, state_idx]
        width, before = self._tensors[name].shape[-1], self._state("conv", layer_idx, state_idx)
        if before is None:
            states = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            states = torch.cat([before, conv_states], dim=-1)
        self._keep("conv", layer_idx, state_idx, states[..., -width:])
        return states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._state("recurrent", layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        return self._keep("recurrent", layer_idx, state_idx, recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self._read)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_computed_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._num_computed_tokens + query_length, 0
