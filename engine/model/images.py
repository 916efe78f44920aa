"""Embeddings and positions of the images in a step.

A prompt contains placeholder tokens for each image. In the model's input, the embeddings that the encoder has computed
replace those of the placeholders. Their places follow from the sequence's images, never from token ids: a model may
generate a placeholder, which is then an ordinary token.

    prompt       [ text | image 0 | text | image 1 | text ]
    part                     [ chunk of the prompt ]           it may start and end inside an image
    embeddings          0 1 2 [3 4 5 6]                        of image 0, kept until other images need the memory

Each image is encoded alone, so its embeddings depend on nothing else. They are kept in the host's memory by the image's
digest. Some models (Qwen3-VL) also add features of the encoder after their first layers. In models with RoPE in three
dimensions, an image takes fewer positions than tokens. Each position follows from the grids of the images before it.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from baton.errors import InvalidRequest
from baton.messages import PlacedImage
from engine.core.image_store import ImageStore
from engine.core.runner import StepPart
from engine.uploads import StepNumbers

if TYPE_CHECKING:
    from engine.model.image_reader import ProcessedImages

TYPES = "mm_token_type_ids"
"""Argument of models that gives the kind of each token: 1 for placeholders of images, 0 for text."""
NUM_AROUND = 12
"""Number of tokens around a test image."""
FEATURES = "deepstack_visual_embeds"
"""Argument of a decoder that gives the features to add after its first layers."""


class Embedded(NamedTuple):
    """Result of the encoder for one image, on the host."""

    rows: torch.Tensor
    """`[embeddings, hidden]`."""
    features: tuple[torch.Tensor, ...]
    """Features to add after the first layers, one `[embeddings, hidden]` per layer."""

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.rows, *self.features))


class Probe(NamedTuple):
    """A prompt with a test image."""

    token_ids: list[int]
    image: PlacedImage
    inputs: dict[str, torch.Tensor]
    """Arguments that the model needs, in addition to the tokens, to compute the image itself."""

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        return (self.image,)

    @property
    def ends(self) -> tuple[int, ...]:
        """Ends of the parts in which the prompt is computed; two are inside the image."""
        inside = self.image.offset + self.image.num_tokens // 2
        return (inside, inside + 1, *self.whole_ends)

    @property
    def whole_ends(self) -> tuple[int, ...]:
        """Ends of parts of which the first contains the whole image."""
        return (self.image.end + 1, len(self.token_ids) - 1, len(self.token_ids))


class StepImages:
    """Embeddings of the images in a step.

    Args:
        found: for each piece of an image: the packed indices of its placeholders, the image's embeddings, and the
            rows of these that belong to the piece.
        numbers: the step's numbers.
    """

    def __init__(self, found: Sequence[tuple[np.ndarray, Embedded, slice]], numbers: StepNumbers) -> None:
        places = np.concatenate([at for at, _, _ in found])
        self._places: list[int] = places.tolist()
        self._there = numbers.put(torch.from_numpy(places))
        device = numbers.device
        self._rows = torch.cat([embedded.rows[rows] for _, embedded, rows in found]).to(device)
        by_layer = zip(*[[feature[rows] for feature in embedded.features] for _, embedded, rows in found], strict=True)
        self._features = [torch.cat(of_layer).to(device) for of_layer in by_layer]

    def put_into(self, embeddings: torch.Tensor, begin: int) -> dict[str, Any]:
        """Replace the embeddings of placeholders by those of images, in place.

        Args:
            embeddings: embeddings of consecutive packed tokens, `[tokens, hidden]`.
            begin: packed index of the first of these tokens.

        Returns:
            Additional arguments of the decoder; empty if no image has features for its layers.
        """
        first = bisect_left(self._places, begin)
        last = bisect_left(self._places, begin + len(embeddings))
        there = self._there[first:last] - begin
        embeddings.index_copy_(0, there, self._rows[first:last].to(embeddings.dtype))
        if not self._features or first == last:
            return {}
        mask = torch.zeros(len(embeddings), dtype=torch.bool, device=embeddings.device)
        mask[there] = True
        return {"visual_pos_masks": mask, FEATURES: [each[first:last] for each in self._features]}


class RankImages:
    """The encoder of a rank's model, with the embeddings that it has computed.

    Args:
        model: transformers' model with its encoder.
        reader: decodes images for this model.
        max_bytes: maximum size of the embeddings, and likewise of the received images with their pixels.
    """

    def __init__(self, model: Any, reader: ProcessedImages, max_bytes: int) -> None:
        self.reader = reader
        self.store = ImageStore(reader, self.embedded, max_bytes)
        self._model = model
        self._device = next(model.parameters()).device
        self._has_positions = hasattr(model.base_model, "get_rope_index")
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Embedded] = OrderedDict()
        self._of_step: dict[bytes, Embedded] = {}
        """Embeddings that the current step needs and that were kept when it began."""
        self._lock = threading.Lock()
        self._places_of = lru_cache(64)(self._find_places)
        self._given: dict[str, Any] = {}
        decoder = model.get_decoder()
        self.has_features = FEATURES in inspect.signature(decoder.forward).parameters
        """True if features of the encoder are added after the decoder's first layers."""
        if self.has_features:
            decoder.register_forward_pre_hook(self._with_features, with_kwargs=True)

    def inputs(self, images: StepImages, token_ids: torch.Tensor, begin: int, shape: tuple[int, int]) -> torch.Tensor:
        """Return the inputs of a forward pass, and keep the features of its images for the decoder's hook.

        Args:
            images: the images of the step.
            token_ids: packed tokens of the pass.
            begin: packed index of the first of them.
            shape: shape of the pass's batch.

        Returns:
            Embeddings, `[*shape, hidden]`.
        """
        embeddings = self._model.get_input_embeddings()(token_ids)
        given = images.put_into(embeddings, begin)
        if given:
            given["visual_pos_masks"] = given["visual_pos_masks"].view(shape)
        self._given = given
        found: torch.Tensor = embeddings.unflatten(0, (1, -1) if shape[0] == 1 else (-1, 1))
        return found

    def _with_features(
        self, module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook of the decoder: add the features of its pass to the arguments."""
        features, self._given = self._given, {}
        return args, given | features

    def encode_largest(self) -> None:
        """Encode an image of the largest allowed size. While it does not fit into memory, halve the allowed tokens."""
        while True:
            try:
                self.encoded(self.reader.largest().pixels)
            except torch.OutOfMemoryError:
                self.reader.halve()
                torch.cuda.empty_cache()
            else:
                return

    def begin_step(self) -> None:
        """Drop the features that a failed pass may have left."""
        self._given = {}

    def end_probe(self) -> None:
        """Drop the test image, and what the model has stored about it."""
        with self._lock:
            self._kept.clear()
        if self._has_positions:
            self._model.base_model.rope_deltas = None

    def probe(self, vocab_size: int) -> Probe:
        """Return a prompt with a small image, whose embeddings are computed and kept."""
        read = self.reader.probe()
        token_ids = self.reader.token_ids(read.grid)
        others = [token for token in range(vocab_size) if token not in set(token_ids)][:NUM_AROUND]
        image = PlacedImage(digest=b"probe", offset=len(others) // 2, num_tokens=len(token_ids), grid=read.grid)
        prompt = [*others[: image.offset], *token_ids, *others[image.offset :]]
        with self._lock:
            self._kept[image.digest] = self.encoded(read.pixels)
        inputs = {name: torch.from_numpy(array).to(self._device) for name, array in read.pixels.items()}
        if TYPES in inspect.signature(self._model.forward).parameters:
            inputs[TYPES] = torch.tensor(
                [[int(token == self.reader.placeholder) for token in prompt]], device=self._device
            )
        return Probe(prompt, image, inputs)

    def positions(self, part: StepPart) -> torch.Tensor:
        """Return the positions of a part's tokens, `[3, tokens]` if they have three dimensions and there is an image in
        or after the part, else `[tokens]`.
        """
        begin, end = part.num_computed_tokens, part.end
        plain = torch.arange(begin, end)
        if not (part.images and self._has_positions):
            return plain
        if begin >= part.images[-1].end:  # as in every step of decoding
            return plain + sum(map(self._shift, part.images))
        merge, shift, found = self.reader.merge_size, 0, plain.expand(3, -1).clone()
        for image in part.images:
            if image.offset >= end:
                break
            width = image.grid[2] // merge
            first, last = max(begin, image.offset), min(end, image.end)
            if first < last:
                place = torch.arange(first, last) - image.offset
                within = torch.stack([torch.zeros_like(place), place // width, place % width])
                found[:, first - begin : last - begin] = within + image.offset + shift
            shift += self._shift(image)
            found[:, max(0, image.end - begin) :] = plain[max(0, image.end - begin) :] + shift
        return found

    def decode_position(self, part: StepPart) -> int:
        """Return the position of the only token of a decoding part. The token is in no image."""
        shift = sum(map(self._shift, part.images)) if self._has_positions else 0
        return part.num_computed_tokens + shift

    def _shift(self, image: PlacedImage) -> int:
        """Return the number of positions that an image takes minus its number of tokens; never above 0."""
        merge = self.reader.merge_size
        return max(image.grid[1] // merge, image.grid[2] // merge) - image.num_tokens

    def step_positions(self, parts: Sequence[StepPart]) -> torch.Tensor:
        """Return the positions of a step's packed tokens, `[3, tokens]` or `[tokens]`; see `positions`."""
        found = [self.positions(part) for part in parts]
        if all(each.dim() == 1 for each in found):
            return torch.cat(found)
        return torch.cat([each.expand(3, -1) for each in found], dim=1)

    def of_step(self, parts: Sequence[StepPart], numbers: StepNumbers) -> StepImages | None:
        """Return the embeddings of the images in a step; None: it has no placeholders.

        Raises:
            ImagesMissing: the embeddings of an image are not kept, and the worker does not hold the image.
        """
        found, packed = [], 0
        for part in parts:
            for image in part.images:
                places = self._places_of(image.grid)
                first, last = self._rows_in(part, image, places)
                if first < last:
                    at = places[first:last] + (image.offset - part.num_computed_tokens + packed)
                    found.append((at, self.embedded(image), slice(first, last)))
            packed += len(part.token_ids)
        return StepImages(found, numbers) if found else None

    def has_placeholders(self, parts: Sequence[StepPart]) -> bool:
        """Return whether a step computes placeholders of images."""
        return any(True for part in parts for _ in self._needed(part))

    @contextlib.contextmanager
    def held(self, parts: Sequence[StepPart]) -> Iterator[frozenset[int]]:
        """Context manager: keep the images that a step needs until it has been computed, for one step at a time.

        Otherwise one might be evicted after this check, which would fail the step for all its parts.

        Returns:
            Indices of the parts that cannot be computed: they need an image that is neither encoded nor held.
        """
        needed = [self._needed(part) for part in parts]
        if not any(needed):
            yield frozenset()
            return
        with self.store.pinned([image for images in needed for image in images]) as pinned:
            with self._lock:
                digests = {image.digest for images in needed for image in images}
                self._of_step = {digest: self._kept[digest] for digest in digests if digest in self._kept}
            found = pinned | self._of_step.keys()
            try:
                yield frozenset(
                    index for index, images in enumerate(needed) if any(image.digest not in found for image in images)
                )
            finally:
                self._of_step = {}

    def _needed(self, part: StepPart) -> list[PlacedImage]:
        spans = ((image, *self._rows_in(part, image, self._places_of(image.grid))) for image in part.images)
        return [image for image, first, last in spans if first < last]

    def embedded(self, image: PlacedImage) -> Embedded:
        """Return the embeddings of an image. Encode the image unless they are kept.

        Raises:
            ImagesMissing: they are not kept, and the worker does not hold the image.
            InvalidRequest: the encoder returns another number of embeddings than the image has placeholders.
        """
        with self._lock:
            if (kept := self._kept.get(image.digest)) is not None:
                self._kept.move_to_end(image.digest)
                return kept
            if (kept := self._of_step.get(image.digest)) is not None:
                return kept
        found = self.encoded(self.store.pixels(image.digest))
        if len(found.rows) != (expected := len(self._places_of(image.grid))):
            raise InvalidRequest(
                f"the model's encoder returns {len(found.rows)} embeddings for an image with {expected} tokens; send "
                "another image"
            )
        with self._lock:
            self._kept[image.digest] = found
            excess = sum(each.num_bytes for each in self._kept.values()) - self._max_bytes
            while excess > 0 and len(self._kept) > 1:
                excess -= self._kept.popitem(last=False)[1].num_bytes
        return found

    @torch.inference_mode()
    def encoded(self, pixels: dict[str, np.ndarray]) -> Embedded:
        """Compute the embeddings of an image on the rank's device."""
        given = {name: torch.from_numpy(array).to(self._device) for name, array in pixels.items()}
        found = self._model.get_image_features(**given, return_dict=True)
        return Embedded(
            _joined(found.pooler_output).cpu(),
            tuple(_joined(each).cpu() for each in getattr(found, "deepstack_features", None) or ()),
        )

    def _rows_in(self, part: StepPart, image: PlacedImage, places: np.ndarray) -> tuple[int, int]:
        """Return the range of an image's embeddings whose placeholders are in a part."""
        if part.num_computed_tokens >= image.end or part.end <= image.offset:
            return 0, 0
        begin, end = part.num_computed_tokens - image.offset, part.end - image.offset
        first, last = np.searchsorted(places, (begin, end))
        return int(first), int(last)

    def _find_places(self, grid: tuple[int, ...]) -> np.ndarray:
        """Return the indices of the placeholders among the tokens of an image, ascending."""
        return np.flatnonzero(np.array(self.reader.token_ids(grid)) == self.reader.placeholder)


def _joined(rows: Any) -> torch.Tensor:
    """Return embeddings as one tensor, `[embeddings, hidden]`, given one tensor or several."""
    return (torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows).flatten(0, -2)
