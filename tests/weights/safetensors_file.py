"""Writes safetensors files, also malformed ones, without the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_DTYPES = {"uint16": "BF16", "uint8": "F8_E4M3", "float32": "F32"}


def write(path: Path, tensors: Mapping[str, np.ndarray], **changes: object) -> None:
    """One behind the other: uint16 as BF16, uint8 as F8_E4M3. changes: to what the header says of each."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        entry = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        header[name] = entry | changes
        end += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))
