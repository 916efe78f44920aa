"""Makes this interpreter import `fake_vllm.hosted` under the name `engine.vllm.hooks`."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REPLACED = "engine.vllm.hooks"


class Redirect:
    """Finder and loader of the replaced module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == REPLACED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        from . import hosted

        return hosted

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module is already executed."""


sys.meta_path.insert(0, Redirect())
