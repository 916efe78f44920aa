"""The settings' defaults without pydantic, which a bare machine may lack: read from the source."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstore.transfer.transport.nccl_env import PINNED

ROOT = Path(__file__).resolve().parents[3]


def defaults_of(module: str, section: str) -> dict[str, Any]:
    """The defaults of a section's fields: those that are plain values."""
    tree = ast.parse((ROOT / "baton" / "config" / f"{module}.py").read_text())
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == section)
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign) and node.value is not None]
    return {
        node.target.id: _value_of(node.value)
        for node in fields
        if isinstance(node.target, ast.Name) and node.value is not None
    }


def _value_of(node: ast.expr) -> Any:
    code = compile(ast.Expression(node), "settings", "eval")
    try:
        return eval(code, {"__builtins__": {}})  # a number, a text, or a product of numbers
    except Exception:
        return None


def transfer_config(**changes: Any) -> Any:
    return SimpleNamespace(**defaults_of("transfer", "TransferConfig") | changes)


def model_config(path: str, **changes: Any) -> Any:
    return SimpleNamespace(**defaults_of("engine", "ModelConfig") | {"path": path} | changes)


class _EngineConfig(SimpleNamespace):
    """Settings of an engine, of which how many sequences and tokens it takes are numbers, not auto."""

    def batch(self, *, on_gpu: bool) -> Any:
        return SimpleNamespace(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            plans_ahead=on_gpu,
        )


def engine_config(*, max_num_seqs: int, max_num_batched_tokens: int = 2048, **changes: Any) -> Any:
    every, own = (defaults_of("engine", section) for section in ("EveryEngineConfig", "EngineConfig"))
    batch = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    return _EngineConfig(**every | own | batch | changes)


def child_environment() -> dict[str, str]:
    """What a check's process begins with: that of a CUDA worker, so torch ends no process for a transport."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    here = {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    here["PYTHONDONTWRITEBYTECODE"] = ""  # if it is set, as in some images, each process may compile all of torch anew
    return PINNED | here
