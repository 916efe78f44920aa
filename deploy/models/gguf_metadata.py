"""Key-value part of a GGUF file, which describes its weights and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import ModelLoadError


class Metadata:
    """Key-value part of a GGUF file."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def get(self, key: str, default: Any = None) -> Any:
        return self._fields.get(key, default)

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise ModelLoadError(f"The GGUF file has no {key}.")
        return self._fields[key]
