"""What tests of true GPUs take of others, and a GPU that is in use already."""

import os

# Before CUDA begins: a stream of each rank is to have a queue of its own, since kernels wait for each other's.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from tests.support.gpu_in_use import gpu_is_in_use as gpu_is_in_use
from tests.weights.conftest import make_fleet as make_fleet
