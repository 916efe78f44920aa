"""Adds LoRA adapters (Hu et al., 2021) to the outputs of transformers' own linear maps, for the rows that have one.

Each linear map that adapters may change has two stacks of matrices, with one place for each slot:

    rows of the step, sorted by slot   | none none | 2 2 2 | 5 |          T tokens
    A  [slots, rank, in]   h = x A^T   grouped product: one matrix for each slot's rows
    B  [slots, rank, out]  y += h B    B includes the scaling

Two products compute the rows of all adapters, however many there are (`torch.nn.functional.grouped_mm`). If the width
of a map is not aligned, each slot takes two products of its own. Ranks are padded with zeros to the largest rank of the
step's adapters.

A map's `forward` is replaced only while a step has rows with adapters. A step without them runs the code of a model
without adapters. If `fused_model` has merged projections, their products are added to slices of the merged output.

With several ranks, B is divided if each rank gets a part of the map's output, and A if each rank has a part of its
input. If all ranks have both whole, neither is divided. If A is divided, the ranks sum `h`, which is narrow; each rank
then adds the whole product, because the map has summed its output.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import grouped_mm

from baton.adapters import ENDS, AdapterFacts, AdapterTarget, require_rank
from baton.errors import InvalidRequest, ModelLoadError, in_one_line
from engine.core.runner import StepPart
from engine.model.kv_cache import lazy_zeros
from engine.uploads import StepNumbers

if TYPE_CHECKING:
    from baton.config import EngineConfig

NAME = "_baton_adapters"
"""Attribute of a linear map that holds its `Piece`s, with the names that adapters use."""
PACKED_BYTES = 16
"""Ranks are padded until the size of a matrix row, in bytes, is a multiple of this, as `grouped_mm` requires."""


class Piece(NamedTuple):
    """Rows of a linear map's weight that were a map of their own in transformers' model."""

    name: str
    """Name of that map."""
    begin: int
    end: int


def name_maps(model: nn.Module) -> None:
    """Record the name of each linear map of a loaded model, before other modules replace some of them."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            setattr(module, NAME, (Piece(name, 0, module.out_features),))


def joined_pieces(maps: Sequence[nn.Module]) -> tuple[Piece, ...]:
    """Return the pieces of a map that merges other maps, in their order; empty if these have no names."""
    found, begin = list[Piece](), 0
    for each in maps:
        pieces: tuple[Piece, ...] = getattr(each, NAME, ())
        found += [Piece(piece.name, begin + piece.begin, begin + piece.end) for piece in pieces]
        begin += len(each.weight) if isinstance(each.weight, torch.Tensor) else 0
    return tuple(found)


class AdapterRows(NamedTuple):
    """Rows of one forward pass that have adapters."""

    rows: slice | torch.Tensor
    """The rows, sorted by slot; a slice if they are contiguous."""
    slots: slice
    """Places in the stacks, from the first to the last slot of the pass."""
    ends: torch.Tensor
    """`[slots]`: end of each place's rows among `rows`."""
    counts: list[int]
    """Number of rows of each place."""
    used: int
    """Bit mask of the slots of the pass."""
    num_tokens: int
    """Number of tokens of the pass, including those without an adapter."""


def rows_with_adapters(parts: Sequence[StepPart], numbers: StepNumbers) -> AdapterRows | None:
    """Return the rows of a pass that have adapters; None: there are none.

    Args:
        parts: the parts in packed order.
        numbers: the step's numbers; the result is valid after they have been sent.
    """
    if not any(part.adapter for part in parts):
        return None
    by_slot: dict[int, list[int]] = {}
    begin = 0
    for part in parts:
        end = begin + len(part.token_ids)
        if part.adapter:
            by_slot.setdefault(part.adapter - 1, []).extend(range(begin, end))
        begin = end
    first, last = min(by_slot), max(by_slot)
    rows, ends = list[int](), list[int]()
    for place in range(first, last + 1):
        rows += by_slot.get(place, [])
        ends.append(len(rows))
    is_one = rows == list(range(rows[0], rows[0] + len(rows)))
    return AdapterRows(
        rows=slice(rows[0], rows[0] + len(rows)) if is_one else numbers.put(torch.tensor(rows)),
        slots=slice(first, last + 1),
        ends=numbers.put(torch.tensor(ends)),
        counts=[end - begin for begin, end in zip([0, *ends], ends, strict=False)],
        used=sum(1 << place for place in by_slot),
        num_tokens=begin,
    )


class _Stack:
    """One rank's matrices of all slots for one map of transformers' model.

    Args:
        name: name of the map in transformers' model.
        shape: widths of the whole input and output.
        split: what a rank has a part of: 0 the map's output, 1 its input; None: it has both whole.
        begin: first column of the map's output in the output of the module that computes the map.
        matrices: A, `[slots, rank, in]`, and B, `[slots, rank, out]`, both zero.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        split: int | None,
        begin: int,
        matrices: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self.name, self.shape, self.split, self.begin = name, shape, split, begin
        self.a, self.b = matrices
        self.end = begin + self.b.shape[-1]
        self.used = 0
        """Bit mask of the slots whose adapters change this map."""
        self._ranks = [0] * len(self.a)
        """Number of rows of each slot's matrices that are not zero."""
        aligned = PACKED_BYTES // self.a.element_size()
        self._is_grouped = not any(matrix.shape[-1] % aligned for matrix in matrices)

    def clear(self, place: int) -> None:
        """Remove a slot's adapter and zero its matrices.

        If any adapter of a step changes the map, the rows of all the step's adapters are multiplied.
        """
        self.used &= ~(1 << place)
        for matrix in (self.a, self.b):
            matrix[place, : self._ranks[place]] = 0.0
        self._ranks[place] = 0

    def put(self, place: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Copy an adapter's whole matrices, `[rank, in]` and `[out, rank]`, into a slot that is clear."""
        if self.split is not None:
            rank, num_ranks = dist.get_rank(), dist.get_world_size()
            a = a if self.split == 0 else a.chunk(num_ranks, 1)[rank]
            b = b.chunk(num_ranks, 0)[rank] if self.split == 0 else b
        self._ranks[place] = len(a)
        self.a[place, : len(a)] = a
        self.b[place, : len(a)] = b.T
        self.used |= 1 << place

    def product(self, given: torch.Tensor, rows: AdapterRows, rank: int) -> torch.Tensor:
        """Return what the adapters add to the output for the rows of a step, `[rows, out]`.

        Args:
            given: input of these rows, `[rows, in]`.
            rank: largest rank of the step's adapters, padded.
        """
        a, b = self.a[rows.slots, :rank], self.b[rows.slots, :rank]
        hidden = self._grouped(given, a.transpose(1, 2), rows)
        if self.split == 1:
            dist.all_reduce(hidden)
        return self._grouped(hidden, b, rows)

    def _grouped(self, given: torch.Tensor, matrices: torch.Tensor, rows: AdapterRows) -> torch.Tensor:
        if self._is_grouped:
            return grouped_mm(given, matrices, offs=rows.ends)
        pieces = torch.split(given, rows.counts)
        return torch.cat([piece @ matrix for piece, matrix in zip(pieces, matrices, strict=True)])


class _Map:
    """Module that computes one or more maps that adapters may change."""

    def __init__(self, module: nn.Module, stacks: Sequence[_Stack], owner: ModelAdapters) -> None:
        self.stacks = stacks
        self._module, self._owner = module, owner
        self._own = module.forward
        self._is_replaced = "forward" in module.__dict__  # by transformers, which divides it among ranks
        self._is_merged = len(getattr(module, NAME)) > 1

    def turn_on(self) -> None:
        """Replace the module's forward pass by one that adds the products of the step's adapters."""
        self._module.__dict__["forward"] = self._forward

    def turn_off(self) -> None:
        """Restore the module's own forward pass."""
        if self._is_replaced:
            self._module.__dict__["forward"] = self._own
        else:
            del self._module.__dict__["forward"]

    def _forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._own(given)
        rows, rank = self._owner.rows, self._owner.rank
        assert rows is not None
        if not any(stack.used & rows.used for stack in self.stacks):
            return out
        flat = given.reshape(-1, given.shape[-1])
        assert len(flat) == rows.num_tokens, "a map is computed for other rows than the step's"
        flat = flat[rows.rows] if isinstance(rows.rows, slice) else flat.index_select(0, rows.rows)
        added = out.view(-1, out.shape[-1])
        for stack in self.stacks:
            if not stack.used & rows.used:
                continue
            of_stack = added[:, stack.begin : stack.end] if self._is_merged else added
            product = stack.product(flat, rows, rank)
            if isinstance(rows.rows, slice):
                of_stack[rows.rows] += product
            else:
                of_stack.index_add_(0, rows.rows, product)
        return out


class ModelAdapters:
    """Slots of the adapters on one rank, and the maps of its model that adapters can change.

    Args:
        model: transformers' model as it was loaded. Enter `watched` while it computes a test step. After its modules
            may have been replaced, call `make`.
        num_slots: number of slots.
        max_rank: largest rank of an adapter.
    """

    def __init__(self, model: nn.Module, num_slots: int, max_rank: int) -> None:
        self._model, self._num_slots, self._max_rank = model, num_slots, max_rank
        self._linear = [module for module in model.modules() if type(module) is nn.Linear]
        name_maps(model)
        self._dtype = next(weight.dtype for weight in model.parameters() if weight.dtype.is_floating_point)
        self._called: dict[str, tuple[int, int] | None] = {}
        """Name of a map -> widths of its input and output on this rank. None: in a watched call, the step's tokens were
        not its rows."""
        self._maps: list[_Map] = []
        self._stacks: dict[str, _Stack] = {}
        """Matrices of each map, by its name."""
        self._ranks = [0] * num_slots
        """Rank of the adapter in each slot."""
        self._changed: list[_Map] = []
        """Maps that any loaded adapter changes. `begin` compares the list by identity, so it is never mutated."""
        self._on: list[_Map] = []
        """Maps that are turned on."""
        self.num_tokens = 0
        """Number of tokens of the forward pass."""
        self.rows: AdapterRows | None = None
        """Rows of the forward pass with adapters."""
        self.rank = 0
        """Largest rank of their adapters, padded."""

    @classmethod
    def of(cls, model: nn.Module, engine: EngineConfig) -> ModelAdapters | None:
        """Return the adapters of a model according to the settings; None: `engine.max_adapters` is 0."""
        return cls(model, engine.max_adapters, engine.max_adapter_rank) if engine.max_adapters else None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager: records which maps are applied to all tokens of a pass, in their order.

        The model's code uses the weights of other maps in another way, so `require_fit` refuses adapters for them.
        """
        called: dict[str, tuple[int, int] | None] = {}
        hooks = [module.register_forward_hook(functools.partial(self._note, called)) for module in self._linear]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._called = called  # not if the pass failed: what an earlier one has recorded is still right

    def _note(
        self,
        called: dict[str, tuple[int, int] | None],
        module: nn.Module,
        given: tuple[Any, ...],
        out: torch.Tensor,
    ) -> None:
        pieces: tuple[Piece, ...] = getattr(module, NAME)
        widths = None
        if given and given[0].shape[:-1].numel() == self.num_tokens:
            widths = given[0].shape[-1], out.shape[-1]
        called[pieces[0].name] = widths if called.get(pieces[0].name, widths) is not None else None

    def make(self) -> None:
        """Create the stacks of the maps that `watched` recorded.

        Raises:
            ModelLoadError: there is not enough memory.
        """
        try:
            for module in self._model.modules():
                pieces: tuple[Piece, ...] = getattr(module, NAME, ())
                if stacks := [self._stack_of(module, each) for each in pieces if self._may_change(each.name)]:
                    self._maps.append(_Map(module, stacks, self))
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(
                f"the matrices of {self._num_slots} adapters of rank {self._max_rank} do not fit into memory next to "
                "the weights: lower engine.max_adapters or engine.max_adapter_rank"
            ) from error
        self._stacks = {stack.name: stack for each in self._maps for stack in each.stacks}
        self._linear = []

    def _may_change(self, name: str) -> bool:
        return self._called.get(name) is not None and name.rpartition(".")[2] not in ENDS

    def _stack_of(self, module: nn.Module, piece: Piece) -> _Stack:
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        split, local = _split_of(weight)
        num_out, num_in = piece.end - piece.begin, weight.shape[1]
        if split is not None and self._called[piece.name] == (num_in, num_out):
            split = None  # every rank gives the map its whole input, and gets its whole output
        widths = (local.shape[1] if split == 1 else num_in, local.shape[0] if split == 0 else num_out)
        rank = _padded(self._max_rank, local.element_size())
        small = functools.partial(lazy_zeros, in_huge_pages=False)  # an adapter uses little of each stack
        zeros = small if local.device.type == "cpu" else torch.zeros
        a, b = (zeros(self._num_slots, rank, width, dtype=local.dtype, device=local.device) for width in widths)
        return _Stack(piece.name, (num_in, num_out), split, piece.begin, (a, b))

    def require_fit(self, facts: AdapterFacts) -> None:
        """Raise InvalidRequest unless every target of an adapter is a map of this model, of its shape."""
        require_rank(facts, self._max_rank)
        for target in facts.targets:
            stack = self._stacks.get(target.module)
            if stack is None:
                raise InvalidRequest(
                    f"the adapter in {facts.path} changes {target.module}, which is no linear map of this model that "
                    "an adapter can change"
                )
            if stack.shape != (target.num_in, target.num_out):
                raise InvalidRequest(
                    f"the adapter in {facts.path} is of another model: its {target.module} maps {target.num_in} to "
                    f"{target.num_out} numbers, and this model's {stack.shape[0]} to {stack.shape[1]}"
                )

    def load_from(self, given: AdapterForRanks) -> None:
        """Load an adapter that rank 0 sent."""
        self.load(given.slot, AdapterWeights.of(given.facts, given.content, self._dtype))

    @torch.no_grad()
    def load(self, slot: int, weights: AdapterWeights) -> None:
        """Load an adapter into a slot that no step uses, and replace the one there."""
        place = slot - 1
        for stack in self._stacks.values():
            stack.clear(place)
        self._ranks[place] = 0
        for name, (a, b) in weights.matrices.items():
            self._stacks[name].put(place, a, b)
            self._ranks[place] = max(self._ranks[place], len(a))
        self._changed = [each for each in self._maps if any(stack.used for stack in each.stacks)]

    def begin(self, rows: AdapterRows | None, num_tokens: int) -> None:
        """Prepare the maps for a forward pass.

        Args:
            rows: rows of the pass with adapters; None: there are none.
            num_tokens: number of all tokens of the pass.
        """
        self.num_tokens = num_tokens
        if rows is None:
            if self._on:
                self._turn([])
            return
        ranks = [rank for place, rank in enumerate(self._ranks) if rows.used >> place & 1]
        self.rows = rows._replace(ends=rows.ends.to(torch.int32))
        self.rank = _padded(max(ranks), self._stacks[next(iter(self._stacks))].a.element_size())
        if self._on is not self._changed:
            self._turn(self._changed)

    def _turn(self, maps: list[_Map]) -> None:
        for each in self._on:
            each.turn_off()
        for each in maps:
            each.turn_on()
        self._on = maps


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Matrices of an adapter, whole: A, `[rank, in]`, and B with the scaling, `[out, rank]`, by name of the map."""

    matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, facts: AdapterFacts, content: bytes, dtype: torch.dtype) -> AdapterWeights:
        """Return the matrices in a weights file.

        Raises:
            InvalidRequest: the file cannot be read, or its matrices are not finite or not as the facts describe them.
        """
        try:
            tensors = safetensors.torch.load(content)
        except Exception as error:  # the library raises no narrower class
            raise InvalidRequest(f"the weights in {facts.path} cannot be read: {in_one_line(error)}") from error
        return cls({target.module: _matrices(facts, target, tensors, dtype) for target in facts.targets})


class AdapterForRanks(NamedTuple):
    """An adapter that rank 0 has read and checked, as it sends it to the other ranks."""

    slot: int
    facts: AdapterFacts
    content: bytes
    """Content of the weights file."""


def _matrices(
    facts: AdapterFacts, target: AdapterTarget, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (target.rank, target.num_in), (target.num_out, target.rank)
    found = [tensors.get(name) for name in target.names]
    for matrix, shape in zip(found, shapes, strict=True):
        if matrix is None or matrix.shape != shape or not matrix.dtype.is_floating_point:
            raise InvalidRequest(f"the weights in {facts.path} hold no float matrix {list(shape)} of {target.module}")
    a, b = (matrix.float() for matrix in found if matrix is not None)
    a, b = a.to(dtype), (b * target.scaling).to(dtype)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise InvalidRequest(f"the weights in {facts.path} are no finite numbers in {dtype} for {target.module}")
    return a, b


def _split_of(weight: torch.Tensor) -> tuple[int | None, torch.Tensor]:
    """Return the dimension in which a weight is divided among ranks (None: in neither), and this rank's part."""
    if not isinstance(weight, DTensor):
        return None, weight
    (placement,) = weight.placements
    local = weight.to_local()
    if type(placement) is Shard:
        return placement.dim % 2, local
    if placement.is_replicate():
        return None, local
    raise ModelLoadError(
        f"engine.max_adapters needs engine.tensor_parallel 1 for this model, whose weights are divided as {placement}"
    )


def _padded(rank: int, num_bytes: int) -> int:
    """Return a rank, rounded up so that a row of this many elements, of `num_bytes` each, is aligned."""
    aligned = PACKED_BYTES // num_bytes
    return -(-rank // aligned) * aligned
