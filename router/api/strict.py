"""What bodies and their fields have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictBody(BaseModel):
    """A body or field in which every name and type is checked."""

    model_config = ConfigDict(extra="forbid", strict=True)
