"""Where there is no GPU, Triton's kernels run in its interpreter."""

import os
from pathlib import Path

GPU = Path("/dev/nvidiactl").exists()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions are made
