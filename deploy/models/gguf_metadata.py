"""Key-value part of a GGUF file, which describes its weights and its tokenizer."""

from __future__ import annotations

from typing import Any

from baton.errors import ModelLoadError


class Metadata:
    """Key-value part of a GGUF file."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise ModelLoadError(f"The GGUF file has no {key}.")
        return self.get(key)
