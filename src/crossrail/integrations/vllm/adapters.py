"""Which weights a LoRA adapter has, for comparison: one name may stand for old ones here and for new ones there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from crossrail._latest import Latest

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # as vLLM looks for them
_CONFIG = "adapter_config.json"
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_DIGEST_BYTES = 16
_REMEMBERED = 1024


class Adapters:
    """Digests of adapters, each computed once, or again after each load_inplace. Threads: the scheduler's."""

    def __init__(self) -> None:
        self._known: Latest[tuple[int, str], tuple[object, bytes]] = Latest(_REMEMBERED)

    def digest_of(self, lora: Any) -> bytes:
        """Of a LoRARequest's files: all of its configuration, and samples of its weights, which differ everywhere after
        training. b"" for None, and for an adapter that is in no folder on this host: nobody knows then.
        """
        if lora is None:
            return b""
        key = (lora.lora_int_id, lora.lora_path)
        state, digest = self._known.get(key, (None, b""))
        if state is not None and not lora.load_inplace:
            return digest
        folder = Path(lora.lora_path).expanduser()
        try:
            path = next(path for name in _WEIGHTS if (path := folder / name).exists())
            found = path.stat()
            now = (found.st_mtime_ns, found.st_size)
            if state != now:
                digest = _digest_of(folder / _CONFIG, path)
        except (OSError, StopIteration):
            now, digest = (0, 0), b""
        self._known[key] = now, digest
        return digest


def _digest_of(config: Path, weights: Path) -> bytes:
    digest = hashlib.sha256(config.read_bytes())
    with weights.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        last = max(size - _SAMPLE_BYTES, 0)
        for i in range(_SAMPLES):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, last * i // (_SAMPLES - 1)))
    return digest.digest()[:_DIGEST_BYTES]
