"""Generates the table of docs/models.md: `python -m tools.model_docs`.

Its types are those that tests hold against transformers' `generate`; what it says of each, a model of transformers'
default configuration of the type answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from transformers import CONFIG_MAPPING

from baton.errors import ModelLoadError
from engine.model.asking import ask
from engine.model.attention_choice import MAX_DIM, MAX_SHARING
from engine.model.shapes import Division, ModelShape
from engine.native.spec import FAMILIES
from tests.integration.test_encoder_decoders import KINDS as WITH_ENCODER
from tests.integration.test_engine_models import EXTRAS, SIZES
from tests.support.diffusion import KINDS as WITH_CANVAS
from tests.support.families import OFTEN, OTHERS, RECURRENT, WHOLE_PROMPTS
from tests.support.pictures import KINDS as WITH_EYES
from tools.chart_docs import between

FAMILIES_BEGIN = "<!-- families: written by `python -m tools.model_docs` -->"
FAMILIES_END = "<!-- end of families -->"
OF_FIELD = {
    "dense": ("llama", "qwen3", "gemma3_text", "gpt2"),
    "experts (MoE)": ("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe"),
    "compressed K and V (MLA)": ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    "reasoning": ("qwen3", "gpt_oss", "deepseek_v3"),
    "state-space": ("mamba2",),
    "hybrids": ("qwen3_next", "nemotron_h", "granitemoehybrid", "falcon_h1"),
    "multimodal ([images](images.md))": ("smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    "encoder and decoder": ("t5", "bart", "m2m_100"),
    "diffusion": ("diffusion_gemma",),
}
"""Families of models, each with some of its types. Those of a family give the same answers below."""
PAGE = Path("docs/models.md")
BEGIN, END = "<!-- models: written by `python -m tools.model_docs` -->", "<!-- end of models -->"
BLOCK_SIZE = 16
OURS = WITH_CANVAS | OTHERS | OFTEN | RECURRENT | WHOLE_PROMPTS | WITH_ENCODER | WITH_EYES


def types() -> list[str]:
    """The types that tests hold against `generate`."""
    return sorted({*FAMILIES, *OURS})


def table() -> str:
    """The rows of all types."""
    head = ["| Type | KiB per token | What layers keep | Ranks divide | Native step | GPU kernels |"]
    return "\n".join([*head, "|---|---|---|---|---|---|", *map(row, types()), ""])


@cache
def shape_of(kind: str) -> tuple[ModelShape, bool]:
    """What a model of the type answers, and whether it is the tests' tiny one: the default one may lack fields."""
    try:
        return ask(CONFIG_MAPPING[kind]()).shape, False
    except ModelLoadError:
        sizes = OURS[kind] if kind in WITH_CANVAS else SIZES | EXTRAS.get(kind, {}) | OURS.get(kind, {})
        return ask(CONFIG_MAPPING[kind](**sizes)).shape, True


def families() -> str:
    """The rows of all families."""
    head = [
        "| Family | Types, for example | A KV transfer carries | Prefixes are reused | An answer goes on elsewhere |"
    ]
    rows = [*head, "|---|---|---|---|---|", *(_family(name, kinds) for name, kinds in OF_FIELD.items())]
    of_adapters = ("as their model's", "as their model's, apart for each adapter's content", "as their model's")
    adapters = "adapters ([LoRA](adapters.md))", "of the types above, on transformers", *of_adapters
    return "\n".join([*rows, f"| {' | '.join(adapters)} |", ""])


def _family(name: str, kinds: Sequence[str]) -> str:
    named = ", ".join(f"`{kind}`" for kind in kinds)
    transferred, reused = ("; ".join(dict.fromkeys(found(kind) for kind in kinds)) for found in (_transferred, _reused))
    again = "its canvas is denoised again" if kinds[0] in WITH_CANVAS else "after its last token"
    return f"| {name} | {named} | {transferred} | {reused} | {again} |"


def _transferred(kind: str) -> str:
    shape, _ = shape_of(kind)
    kept = ["latents" if shape.is_latent else "K and V"] * bool(shape.layers) + ["states"] * bool(shape.states)
    if kind in WITH_ENCODER:
        kept = ["K and V of the encoder's output and of the decoder"]
    return " and ".join(kept) + (" of the prompt, no token" if kind in WITH_CANVAS else "")


def _reused(kind: str) -> str:
    shape, _ = shape_of(kind)
    if kind in WITH_ENCODER or kind in WHOLE_PROMPTS:
        return "no"
    place = "at snapshots of the states" if shape.states else "at every block"
    return f"{place}, also within an image" if kind in WITH_EYES else place


def row(kind: str) -> str:
    """What a model of the type answers."""
    shape, of_test = shape_of(kind)
    spec, is_latent = shape.cache_spec(BLOCK_SIZE, "bfloat16", 1, "bfloat16"), shape.is_latent
    kept = [
        f"{len(g.layers)} x {g.num_kv_heads} x ({g.k_dim} + {g.v_dim}){f' window {g.window}' if g.window else ''}"
        for g in spec.groups
        if g.layers
    ]
    kept += [f"states of {spec.state_bytes / 2**20:.1f} MiB"] * bool(spec.states and not of_test)
    kept += ["states"] * bool(spec.states and of_test) + ["whole prompts"] * (kind in WHOLE_PROMPTS)
    kept += [f"{len(spec.reads)} layers read others'"] * bool(spec.reads)
    kept += [{"s_aux": "sinks", "softcap": "limited scores"}[name] for name in sorted(shape.honours)]
    kept += ["takes images"] * (kind in WITH_EYES) + ["after an encoder, whole prompts"] * (kind in WITH_ENCODER)
    kept += ["canvases"] * (kind in WITH_CANVAS)
    kept += ["latents"] * is_latent + ["of the test's tiny model"] * of_test
    dims = max(max(group.k_dim, group.v_dim) for group in spec.groups)
    is_plain = bool(shape.layers) and not is_latent and kind not in WITH_ENCODER | WITH_CANVAS
    by_kernels = is_plain and dims <= MAX_DIM and max(shape.sharing(spec)) <= MAX_SHARING
    size = "" if of_test else f"{spec.block_bytes / BLOCK_SIZE / 1024:g}"
    said = [size, ", ".join(kept), _divided(shape), *map(_yes, (kind in FAMILIES, by_kernels))]
    return f"| `{kind}` | {' | '.join(said)} |"


def _divided(shape: ModelShape) -> str:
    """Return the parts that several ranks divide, as text."""
    attention = {Division.HEADS: "heads", Division.QUERIES: "query heads", Division.NONE: "all but attention"}
    found = [attention[shape.division]] * shape.has_rank_plan + ["experts"] * shape.has_expert_plan
    return ", ".join(found) or "nothing"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def main() -> None:
    """Write the table into the page."""
    page = between(PAGE.read_text(encoding="utf-8"), BEGIN, table(), END)
    PAGE.write_text(between(page, FAMILIES_BEGIN, families(), FAMILIES_END), encoding="utf-8")


if __name__ == "__main__":
    main()
