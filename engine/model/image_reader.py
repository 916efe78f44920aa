"""Decodes images as transformers does for a model, and names the tokens that stand for them.

The bytes come from clients. The header's size is checked before anything is decoded, only four formats are read, and
the number of tokens is known before pixels are prepared. Transformers' image processor does the rest, with Pillow and
NumPy; no code of the model's folder is run.
"""

from __future__ import annotations

import io
import logging
import math
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError
from tokenizers import Tokenizer
from transformers.image_utils import load_image

from baton.errors import InvalidRequest, ModelLoadError, in_one_line
from baton.model_files import read_json
from engine.core.image_store import ReadImage
from engine.model.pretrained import load_image_processor

if TYPE_CHECKING:
    from baton.config import EngineConfig, ModelConfig

logger = logging.getLogger(__name__)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Pillow's names of the formats that are read; no other parser sees a byte."""
FILES = ("preprocessor_config.json", "processor_config.json")
FAKE, GLOBAL, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
"""Texts with which the processors of Idefics3 and SmolVLM write an image."""
GRID_DIMS = 3
SCAN, MAX_SCANS = b"\xff\xda", 100
"""Start of a scan of a JPEG, and their limit. Each scan passes over the whole image, however few bytes it has."""
MOST_TOKENS = 2**18
"""Maximum number of tokens of any image."""


class Limits(NamedTuple):
    """Limits on a worker's images."""

    max_pixels: int
    """See `engine.max_image_pixels`."""
    max_tokens: int
    """Maximum number of tokens of an image."""


class ProcessedImages(ABC):
    """Reader of a model's images with its own image processor.

    Args:
        processor: transformers' image processor.
        placeholder: see `ImageReader.placeholder`.
        limits: limits on the images.
    """

    merge_size = 0
    """Patches per side of the square that one token stands for; 0: positions do not follow from the grid."""

    def __init__(self, processor: Any, placeholder: int, limits: Limits) -> None:
        self.placeholder = placeholder
        self._processor = processor
        self._max_pixels, self._max_tokens = limits

    @abstractmethod
    def token_ids(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """See `ImageReader.token_ids`."""

    @abstractmethod
    def _grid_of_size(self, height: int, width: int) -> tuple[int, ...]:
        """Return the grid of an image of a size in pixels."""

    @abstractmethod
    def _grid_of(self, found: Any) -> tuple[int, ...]:
        """Return the grid of an image that was prepared."""

    @abstractmethod
    def probe(self) -> ReadImage:
        """Return a small image of noise."""

    def read(self, encoded: bytes) -> ReadImage:
        """See `ImageReader.read`."""
        image = self._decoded(encoded)
        try:
            self._require_few(image)
            return self._prepared(image)
        except InvalidRequest:
            raise
        except Exception as error:  # the processor's own code
            raise InvalidRequest(
                f"the model's image processor refuses an image of {image.width} x {image.height} pixels: "
                f"{in_one_line(error)}"
            ) from error

    def largest(self) -> ReadImage:
        """Return a square image of as many tokens as are allowed, or of nearly as many."""
        side = math.isqrt(self._max_pixels)
        while side > 1 and len(self.token_ids(self._grid_of_size(side, side))) > self._max_tokens:
            side = side * 7 // 8
        return self._prepared(Image.new("RGB", (side, side), (90, 120, 150)))

    def halve(self) -> None:
        """Allow images of half as many tokens from now on."""
        self._max_tokens //= 2
        if not self._max_tokens:
            raise ModelLoadError("not even the smallest image can be encoded in this device's memory")
        logger.warning("the device's memory allows images of at most %d tokens", self._max_tokens)

    def _prepared(self, image: Image.Image, **options: Any) -> ReadImage:
        found = self._processor(images=[image], return_tensors="np", **options)
        pixels = {name: found[name] for name in self._processor.model_input_names if name in found}
        return ReadImage(self._grid_of(found), pixels, sum(array.nbytes for array in pixels.values()))

    def _decoded(self, encoded: bytes) -> Image.Image:
        """Return an upright image in RGB.

        Raises:
            InvalidRequest: see `read`.
        """
        try:
            image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        except UnidentifiedImageError:
            raise InvalidRequest(
                f"these bytes are no image that is read here; send one of {', '.join(FORMATS)}"
            ) from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise InvalidRequest(f"the image is larger than {self._max_pixels} pixels; send a smaller one") from None
        except Exception as error:  # Pillow raises whatever its parsers raise
            raise InvalidRequest(f"the image cannot be read: {in_one_line(error)}") from error
        with image:
            if image.format in ("JPEG", "MPO") and encoded.count(SCAN) > MAX_SCANS:
                raise InvalidRequest(f"the image has more than {MAX_SCANS} scans; save it as an ordinary JPEG")
            if image.width * image.height > self._max_pixels:
                raise InvalidRequest(
                    f"the image has {image.width} x {image.height} pixels, more than {self._max_pixels} "
                    "(engine.max_image_pixels); send a smaller one"
                )
            try:
                # Cameras write JPEGs with a second, smaller picture, which Pillow calls MPO.
                if getattr(image, "is_animated", False) and image.format != "MPO":
                    raise InvalidRequest("the image is animated; send a single frame")
                upright: Image.Image = load_image(image)
                return upright
            except InvalidRequest:
                raise
            except Exception as error:  # see above
                raise InvalidRequest(
                    f"the image cannot be decoded, it may be truncated: {in_one_line(error)}"
                ) from error

    def _require_few(self, image: Image.Image) -> None:
        num_tokens = len(self.token_ids(self._grid_of_size(image.height, image.width)))
        if num_tokens > self._max_tokens:
            raise InvalidRequest(
                f"the image takes {num_tokens} tokens of a prompt, and at most {self._max_tokens} are allowed here "
                "(engine.max_image_tokens, or the longest sequence); send a smaller one"
            )


class MergedPatches(ProcessedImages):
    """Images of Qwen's models: a token for each square of patches, whatever the size. The grid counts the patches."""

    def __init__(self, processor: Any, placeholder: int, limits: Limits) -> None:
        super().__init__(processor, placeholder, limits)
        self.merge_size = int(processor.merge_size)

    def token_ids(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """See `ImageReader.token_ids`."""
        merge = self.merge_size
        if len(grid) != GRID_DIMS or min(grid) < 1 or grid[0] != 1 or grid[1] % merge or grid[2] % merge:
            raise InvalidRequest(f"no image of this model has the grid {grid}")
        num_tokens = math.prod(grid) // merge**2
        if num_tokens > MOST_TOKENS:
            raise InvalidRequest(f"no image of this model has the grid {grid}")
        return (self.placeholder,) * num_tokens

    def _grid_of_size(self, height: int, width: int) -> tuple[int, ...]:
        num_patches = self._processor.get_number_of_image_patches(height, width)
        return (1, self.merge_size, num_patches // self.merge_size)  # only their number matters

    def _grid_of(self, found: Any) -> tuple[int, ...]:
        return tuple(int(number) for number in found["image_grid_thw"][0])

    def probe(self) -> ReadImage:
        """See `ProcessedImages.probe`."""
        side = self._processor.patch_size * self.merge_size
        return self._prepared(_noise(4 * side, 6 * side))


class TiledImages(ProcessedImages):
    """Images of Idefics3 and SmolVLM: tiles of one size, each with its place as tokens, and the whole image.

    The grid is 1 and the numbers of rows and columns; both are 0 for an image that is not divided.

    Args:
        tokenizer: the model's tokenizer.
        num_per_tile: number of embeddings of a tile.
    """

    def __init__(
        self,
        processor: Any,
        placeholder: int,
        limits: Limits,
        *,
        tokenizer: Tokenizer,
        num_per_tile: int,
    ) -> None:
        super().__init__(processor, placeholder, limits)
        self._tokenizer, self._num_per_tile = tokenizer, num_per_tile
        self._written = lru_cache(64)(self._write)

    def token_ids(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """See `ImageReader.token_ids`."""
        if len(grid) != GRID_DIMS or min(grid) < 0 or grid[0] != 1 or bool(grid[1]) != bool(grid[2]):
            raise InvalidRequest(f"no image of this model has the grid {grid}")
        if (1 + grid[1] * grid[2]) * self._num_per_tile > MOST_TOKENS:
            raise InvalidRequest(f"no image of this model has the grid {grid}")
        return self._written(grid[1], grid[2])

    def _write(self, rows: int, columns: int) -> tuple[int, ...]:
        tokens = IMAGE * self._num_per_tile
        tiles = [
            "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        text = "".join(tiles) + ("\n" if tiles else "") + f"{FAKE}{GLOBAL}{tokens}{FAKE}"
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _grid_of_size(self, height: int, width: int) -> tuple[int, ...]:
        _, rows, columns = self._processor.get_number_of_image_patches(height, width)
        return (1, rows, columns) if rows * columns > 1 else (1, 0, 0)

    def _grid_of(self, found: Any) -> tuple[int, ...]:
        return (1, int(found["rows"][0][0]), int(found["cols"][0][0]))

    def _prepared(self, image: Image.Image, **options: Any) -> ReadImage:
        return super()._prepared(image, return_row_col_info=True, **options)

    def probe(self) -> ReadImage:
        """See `ProcessedImages.probe`."""
        return self._prepared(_noise(48, 64), do_image_splitting=False)


def reader_of(model: ModelConfig, engine: EngineConfig, config: Any, max_tokens: int) -> ProcessedImages | str:
    """Return the reader of a model's images, or the reason why the worker takes none.

    Args:
        config: transformers' configuration of the model.
        max_tokens: the longest sequence.
    """
    folder, vision = Path(model.path), getattr(config, "vision_config", None)
    placeholder = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    reasons = {
        "the model takes text only": vision is None or not isinstance(placeholder, int),
        "engine.images is off": engine.images == "off",
        f"the model's folder has no {FILES[0]}": not any((folder / name).is_file() for name in FILES),
        "engine.tensor_parallel is more than 1": engine.tensor_parallel > 1,
        f"model.weights is {model.weights}": model.weights != "exact",
        "engine.batch_invariant is on": engine.batch_invariant,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return reason
    assert isinstance(placeholder, int)
    try:
        processor = load_image_processor(folder, config)
        limits = Limits(engine.max_image_pixels, min(max_tokens - 1, engine.max_image_tokens or max_tokens))
        return _reader(processor, placeholder, limits, folder, config)
    except Exception as error:  # the library raises no narrower class
        return f"its image processor cannot be used: {in_one_line(error)}"


def _reader(processor: Any, placeholder: int, limits: Limits, folder: Path, config: Any) -> ProcessedImages | str:
    name = type(processor).__name__
    if name == "Qwen2VLImageProcessorPil":
        if (merge := getattr(config.vision_config, "spatial_merge_size", None)) != processor.merge_size:
            return (
                f"its image processor merges {processor.merge_size} patches per side, and its config.json says {merge}"
            )
        return MergedPatches(processor, placeholder, limits)
    if name not in ("Idefics3ImageProcessorPil", "SmolVLMImageProcessorPil"):
        return f"images that need a {name} are not supported"
    vision = config.vision_config
    num_per_tile = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    stated = read_json(folder / "processor_config.json").get("image_seq_len", num_per_tile)
    if stated != num_per_tile:
        return f"its processor_config.json says {stated} tokens per tile, and its config.json {num_per_tile}"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if tokenizer.token_to_id(IMAGE) != placeholder or None in map(tokenizer.token_to_id, (FAKE, GLOBAL)):
        return f"its tokenizer lacks {FAKE} or {GLOBAL}, or its {IMAGE} is not token {placeholder}"
    return TiledImages(processor, placeholder, limits, tokenizer=tokenizer, num_per_tile=num_per_tile)


def _noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))
