"""Packs weights for `step.c`, each matrix in the smallest format that restores its float32 values bit for bit.

A bfloat16 checkpoint is stored as bfloat16. Weights that were converted from GGUF's Q8_0 or Q4_1 still show their
codes: a block of 32 inputs contains multiples of one scale, or such multiples plus a minimum, both of them float16. The
codes are derived from the values and verified by computing the values again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F  # noqa: N812 - the name the field uses

from engine.native.layout import BLOCK, PANEL, MatrixStruct


class Form(IntEnum):
    """Storage format of a matrix's weights; `step.c` has a drawing of each."""

    F32 = 0
    BF16 = 1
    Q8_0 = 2
    Q4_1 = 3
    DOT_Q8 = 4
    DOT_Q4 = 5
    DOT_FINE = 6
    PAIRS = 7
    PAIRS_Q8 = 8
    PAIRS_Q4 = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """Matrix in panels of 32 outputs."""

    form: Form
    num_outputs: int
    num_inputs: int
    weights: torch.Tensor
    scale: torch.Tensor | None = None
    """Float16, as `least`: `[panels, blocks, 32]`."""
    least: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        parts = (self.weights, self.scale, self.least, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    def struct(self) -> MatrixStruct:
        """Return the structure for `step.c`. It is valid while this matrix lives."""
        pointers = [0 if part is None else part.data_ptr() for part in (self.scale, self.least, self.bias)]
        num_panels = -(-self.num_outputs // PANEL)
        return MatrixStruct(
            self.form, self.num_outputs, self.num_inputs, num_panels, self.weights.data_ptr(), *pointers
        )


def pack(parts: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], *, apart: bool = False) -> PackedMatrix:
    """Pack matrices with the same inputs as one.

    Args:
        parts: float32, `[outputs, inputs]` each.
        biases: bias of each part; None: it has none.
        apart: whether each part starts with a new panel.
    """
    rows = PANEL if apart else 1
    weight = torch.cat([_padded(part, rows) for part in parts])
    bias = None
    if any(one is not None for one in biases):
        given = [
            torch.zeros(len(part)) if one is None else one.detach().float()
            for part, one in zip(parts, biases, strict=True)
        ]
        bias = _padded(torch.cat([_padded(one, rows) for one in given]), PANEL).contiguous()
    num_outputs, num_inputs = weight.shape
    form, packed, scale, least = _smallest(_padded(weight, PANEL))
    return PackedMatrix(
        form=form,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        weights=packed,
        scale=scale,
        least=least,
        bias=bias,
    )


def _smallest(weight: torch.Tensor) -> tuple[Form, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the smallest exact format, and in panels: the weights, scales and minimums."""
    if (half := _as_bfloat16(weight)) is not None:
        return Form.BF16, _panels(half), None, None
    if weight.shape[1] % BLOCK == 0:
        if (found := _as_q8_0(weight)) is not None:
            codes, scale = found
            return Form.Q8_0, _panels(codes), _panels(scale.half()), None
        if (all_found := _as_q4_1(weight)) is not None:
            codes, scale, least = all_found
            halves = _panels(codes).view(-1, 2, PANEL // 2)
            return Form.Q4_1, halves[:, 0] | (halves[:, 1] << 4), _panels(scale.half()), _panels(least.half())
    return Form.F32, _panels(weight), None, None


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Embedding row by row: in bfloat16 or as Q8_0 codes if that is exact, otherwise in float32."""

    form: Form
    rows: torch.Tensor
    scale: torch.Tensor | None = None
    """`[vocabulary, blocks]`, for Q8_0."""


def embedding_rows(weight: torch.Tensor) -> EmbeddingRows:
    """Return the embedding, `[vocabulary, width]` in float32, in the smallest exact format."""
    if (half := _as_bfloat16(weight)) is not None:
        return EmbeddingRows(Form.BF16, half.contiguous())
    if weight.shape[1] % BLOCK == 0 and (found := _as_q8_0(weight.detach())) is not None:
        return EmbeddingRows(Form.Q8_0, *found)
    return EmbeddingRows(Form.F32, weight.detach().contiguous())


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Weights of a layer, by the fields of `step.c`."""

    norms: Mapping[str, torch.Tensor]
    matrices: Mapping[str, PackedMatrix]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """All read-only data of a model's steps."""

    cos: torch.Tensor
    """`[positions, half of the rotated dimensions]`, as `sin`."""
    sin: torch.Tensor
    embedding: EmbeddingRows
    norm: torch.Tensor
    head: PackedMatrix
    layers: Sequence[PackedLayer]

    @property
    def matrices(self) -> Iterator[PackedMatrix]:
        yield self.head
        for layer in self.layers:
            yield from layer.matrices.values()


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(rows) % multiple
    return F.pad(rows.detach(), (0, 0, 0, missing) if rows.dim() == 2 else (0, missing)) if missing else rows.detach()


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """Return `[outputs, columns]` as `[panels, columns, 32]`."""
    return rows.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _as_bfloat16(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the upper halves as int16 if all lower halves are 0; otherwise None."""
    bits = weight.detach().contiguous().view(torch.int32)
    for rows in (bits[:PANEL], bits):
        if bool((rows & 0xFFFF).any()):
            return None
    return (bits >> 16).to(torch.int16)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(len(weight), -1, BLOCK)


def _as_q8_0(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return codes `[outputs, inputs]` and scales `[outputs, blocks]`, or None.

    The largest code of a block is 127 or -127, because that is how Q8_0 chooses the scale.
    """
    codes = scale = None
    for rows in (weight[:PANEL], weight):
        blocks = _blocks(rows)
        scale = (blocks.abs().amax(-1) / 127).half().float()
        codes = (blocks / torch.where(scale == 0, 1, scale)[..., None]).round_().clamp_(-127, 127)
        codes += 0.0  # an integer is no -0
        if not _same_bits(codes * scale[..., None], blocks):
            return None
    assert codes is not None
    assert scale is not None
    return codes.to(torch.int8).view_as(weight), scale


def _as_q4_1(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return codes, scales and minimums, or None. Scales and minimums are float16 values.

    The smallest code of a block is 0 and its largest 15, because that is how Q4_1 chooses scale and minimum. The
    product of code and scale is exact in float32, so the addition rounds once, as a fused multiply-add does.
    """
    codes = scale = least = None
    for rows in (weight[:PANEL], weight):
        blocks = _blocks(rows)
        least = blocks.amin(-1).half().float()
        scale = ((blocks.amax(-1) - least) / 15).half().float()
        codes = ((blocks - least[..., None]) / torch.where(scale == 0, 1, scale)[..., None]).round_().clamp_(0, 15)
        if not _same_bits(codes * scale[..., None] + least[..., None], blocks):
            return None
    assert codes is not None
    assert scale is not None
    assert least is not None
    return codes.to(torch.uint8).view_as(weight), scale, least
