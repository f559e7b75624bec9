"""What wrappers of modules put into the names of parameters, and which other name was probably meant."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

# Attributes in which torch.compile, FSDP1 and activation checkpoints keep the module that they wrap, at any depth.
_ATTRIBUTES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_OUTER = "module."  # of DistributedDataParallel, DataParallel and AveragedModel, before all the rest
_PEFT = "base_model.model."
_PEFT_BASE = "base_layer"
_ADAPTER = "lora_"
_ALIKE = 0.8  # of difflib's ratio
_COMPARED_MAX = 2000


def unwrapped(name: str) -> str:
    """The name without what wrappers put into it that leave parameters as they are; peft's are not among them."""
    words = [word for word in name.split(".") if word not in _ATTRIBUTES]
    return ".".join(words).removeprefix(_OUTER)


def merged(name: str) -> str:
    """The name of a parameter of peft's that has its adapters merged into it, as the model without peft has it."""
    return ".".join(word for word in unwrapped(name).removeprefix(_PEFT).split(".") if word != _PEFT_BASE)


def meant(name: str, known: Collection[str]) -> str:
    """ ": .." with the known name that this one was probably meant to be, and what makes the difference; "": none."""
    bare = unwrapped(name)
    for other in known:
        if unwrapped(other) == bare:
            return f": there is {other!r}. Leave out what a wrapper put into the name, as add_tensor() does"
    if any(word.startswith(_ADAPTER) for word in bare.split(".")):
        return ": it is an adapter of peft's. Merge it into what it adapts, and leave it out"
    plain = merged(name)
    for other in known:
        if merged(other) == plain:
            return f": there is {other!r}. Merge peft's adapters, and leave out what it put into the name"
    last = bare.rpartition(".")[2]
    alike = [other for other in known if other.rpartition(".")[2] == last] or list(known)
    close = get_close_matches(bare, alike[:_COMPARED_MAX], 1, _ALIKE)
    return f": there is {close[0]!r}" if close else ""
