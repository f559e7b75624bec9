"""Loads a tokenizer from a directory in transformers' format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crossrail._extras import needs
from crossrail.errors import UsageError
from crossrail.kv.model import Tokens

with needs(__name__, "'crossrail[transformers]'"):
    from transformers import AutoTokenizer

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


class TextTokenizer:
    """A crossrail.kv.model.Tokenizer around one of transformers. Like that one, it may begin prompts with a special
    token.
    """

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
    return any((directory / name).exists() for name in _FILES)
