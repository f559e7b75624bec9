"""What tests of true GPUs take of others."""

from tests.weights.conftest import make_fleet as make_fleet
