"""Hooks around functions: those of kind AROUND, which get what they replace as their first argument."""

import functools
import pkgutil
from enum import Enum


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    _hooks: dict = {}

    @classmethod
    def register(cls, target, hook, hook_type, *, source=None):
        assert hook_type is HookType.AROUND
        cls._hooks[target] = hook

    @classmethod
    def apply_hooks(cls):
        for target, hook in cls._hooks.items():
            place, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(place)
            setattr(owner, name, _around(getattr(owner, name), hook))
        cls._hooks.clear()


def _around(original, hook):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return hook(original, *args, **kwargs)

    return wrapper
