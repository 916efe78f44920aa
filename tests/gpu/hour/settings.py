"""The settings' defaults without pydantic, which a bare machine may lack: read from the source."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstore.transfer.transport.nccl_env import nccl_environment

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


def engine_config(**changes: Any) -> Any:
    every, own = (defaults_of("engine", section) for section in ("EveryEngineConfig", "EngineConfig"))
    return SimpleNamespace(**every | own | changes)


def child_environment() -> dict[str, str]:
    """What a check's process begins with: that of a CUDA worker, so torch ends no process for a transport."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    here = {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return nccl_environment(transfer_config(op_timeout_s=5.0)) | here
