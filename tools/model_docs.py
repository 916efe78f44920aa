"""Generates the table of docs/models.md: `python -m tools.model_docs`.

Its types are those that tests hold against transformers' `generate`; what it says of each, a model of transformers'
default configuration of the type answers.
"""

from __future__ import annotations

from pathlib import Path

from transformers import CONFIG_MAPPING

from baton.errors import ModelLoadError
from engine.model.asking import ask
from engine.model.attention_choice import MAX_DIM, MAX_SHARING
from engine.model.shapes import Division, ModelShape
from engine.native.spec import FAMILIES
from tests.integration.test_encoder_decoders import KINDS as WITH_ENCODER
from tests.integration.test_engine_models import EXTRAS, SIZES
from tests.support.families import OFTEN, OTHERS, RECURRENT, WHOLE_PROMPTS
from tests.support.pictures import KINDS as WITH_EYES
from tools.chart_docs import between

PAGE = Path("docs/models.md")
BEGIN, END = "<!-- models: written by `python -m tools.model_docs` -->", "<!-- end of models -->"
BLOCK_SIZE = 16
OURS = OTHERS | OFTEN | RECURRENT | WHOLE_PROMPTS | WITH_ENCODER | WITH_EYES


def types() -> list[str]:
    """The types that tests hold against `generate`."""
    return sorted({*FAMILIES, *OURS})


def table() -> str:
    """The rows of all types."""
    head = ["| Type | KiB per token | What layers keep | Ranks divide | Native step | GPU kernels |"]
    return "\n".join([*head, "|---|---|---|---|---|---|", *map(row, types()), ""])


def row(kind: str) -> str:
    """What a model of the type answers."""
    try:
        shape, of_test = ask(CONFIG_MAPPING[kind]()).shape, False
    except ModelLoadError:  # the default configuration lacks some fields
        sizes = SIZES | EXTRAS.get(kind, {}) | OURS.get(kind, {})
        shape, of_test = ask(CONFIG_MAPPING[kind](**sizes)).shape, True
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
    kept += ["latents"] * is_latent + ["of the test's tiny model"] * of_test
    dims = max(max(group.k_dim, group.v_dim) for group in spec.groups)
    is_plain = bool(shape.layers) and not is_latent and kind not in WITH_ENCODER
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
    PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), BEGIN, table(), END), encoding="utf-8")


if __name__ == "__main__":
    main()
