"""What tests of true GPUs take of others, and a GPU that is in use already."""

from tests.support.gpu_in_use import gpu_is_in_use as gpu_is_in_use
from tests.weights.conftest import make_fleet as make_fleet
