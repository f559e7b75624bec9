"""What lies in a directory as transformers saves it: a model, and perhaps a tokenizer. Nothing is ever downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from crossrail.errors import UsageError
from crossrail.kv.layout import dtype_name
from crossrail.kv.model import Tokens
from crossrail.kv.models.hosted import HostedModel, HostOptions

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def open_checkpoint(directory: Path, options: HostOptions) -> HostedModel:
    """UsageError when there is no causal language model that we can host. Code that lies there is not run."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        dtype = torch_dtype(options.dtype) if options.dtype else config.dtype or torch.float32
        model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"no model can be loaded from {directory}: {error}") from None
    ends = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
    end_tokens = frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)
    return HostedModel(model, directory.resolve().name, end_tokens, options)


class TextTokenizer:
    """A crossrail.kv.model.Tokenizer around one of transformers. It begins prompts as that does, often with a token."""

    def __init__(self, directory: Path) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UsageError(f"no tokenizer can be loaded from {directory}: {error}") from None

    def encode(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text), np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in _TOKENIZER_FILES)


def torch_dtype(name: str) -> torch.dtype:
    """UsageError for what is no floating type that KV may have."""
    dtype = getattr(torch, dtype_name(name))
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise UsageError(f"dtype={name!r}: models run in float64, float32, bfloat16 or float16 here")
    assert isinstance(dtype, torch.dtype)
    return dtype
