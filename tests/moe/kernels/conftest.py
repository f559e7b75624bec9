"""Where there is no GPU, Triton's kernels run in its interpreter."""

import os
from pathlib import Path

GPU = Path("/dev/nvidiactl").exists()
# It plays a GPU whose tensors are a host's.
collect_ignore = ["test_triton_rounds.py"] if GPU else []
if GPU:
    from tests.support.gpu_in_use import gpu_is_in_use as gpu_is_in_use
else:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions are made
