"""Puts functions of ours around methods of SGLang's, by SGLang's own registry of hooks, in processes that have them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_hooked: set[str] = set()


def hook_around(module: str, method: str, around: Callable[..., Any]) -> bool:
    """Whether this process has that module, and `around` is called instead of the method, which is its first argument.

    method: "Class.name". Idempotent.
    """
    if module not in sys.modules:
        return False
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = f"{module}.{method}"
    if target not in _hooked:
        _hooked.add(target)
        HookRegistry.register(target, around, HookType.AROUND)
        HookRegistry.apply_hooks()  # again: the plug-in's own are in place
    return True
