"""Has this interpreter find `fake_vllm.hosted` under the name of `engine.vllm.hooks`."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REPLACED = "engine.vllm.hooks"


class Redirect:
    """A finder of modules, and the loader of the one that it finds."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == REPLACED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        from . import hosted

        return hosted

    def exec_module(self, module: ModuleType) -> None:
        """It is executed already."""


sys.meta_path.insert(0, Redirect())
