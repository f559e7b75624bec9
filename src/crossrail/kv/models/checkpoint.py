"""Loads a model from a directory in transformers' format. Nothing is ever downloaded."""

from __future__ import annotations

from pathlib import Path

from crossrail._extras import needs
from crossrail.errors import UsageError
from crossrail.kv.models.hosted import HostedModel, HostOptions
from crossrail.kv.transfer.layout import dtype_name

with needs(__name__, "'crossrail[transformers]'"):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM


def open_checkpoint(directory: Path, options: HostOptions) -> HostedModel:
    """UsageError unless the directory has a causal language model that we can host. Code in the directory
    is never run.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        dtype = torch_dtype(options.dtype) if options.dtype else config.dtype or torch.float32
        model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"no model can be loaded from {directory}: {error}") from None
    ends = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
    end_tokens = frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)
    return HostedModel(model, directory.resolve().name, end_tokens, options)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name. UsageError unless it is a floating type that KV may have."""
    dtype = getattr(torch, dtype_name(name))
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise UsageError(f"dtype={name!r}: models run in float64, float32, bfloat16 or float16 here")
    assert isinstance(dtype, torch.dtype)
    return dtype
