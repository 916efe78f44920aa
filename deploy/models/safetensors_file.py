"""Writer of a safetensors file that holds a part of one tensor in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
ALIGNMENT = 8


def write_float32(
    path: Path, shapes: Mapping[str, tuple[int, ...]], parts_of: Callable[[str], Iterable[Array]]
) -> None:
    """Write tensors of float32: the same bytes as `safetensors.numpy.save_file`, which needs all of them at once.

    Args:
        shapes: name of each tensor -> shape.
        parts_of: name -> consecutive parts of the tensor. It is called once a name, in alphabetical order.

    Raises:
        OSError: the file cannot be written.
        ValueError: the parts of a tensor do not make its shape.
    """
    header, begin = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(shapes):
        end = begin + 4 * math.prod(shapes[name])
        header[name] = {"dtype": "F32", "shape": [*shapes[name]], "data_offsets": [begin, end]}  # type: ignore[dict-item]
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in sorted(shapes):
                num_numbers = 0
                for part in parts_of(name):
                    file.write(np.ascontiguousarray(part, dtype="<f4").data)
                    num_numbers += part.size
                if num_numbers != math.prod(shapes[name]):
                    raise ValueError(f"{name} has {num_numbers} numbers, and its shape is {shapes[name]}")
    except OSError as error:  # a full disk
        raise OSError(f"{path.name}: {error}") from error
