"""On a GPU or, as tests/conftest.py has it, in Triton's interpreter."""

from tests.conftest import HAS_GPU

# It plays a GPU whose tensors are a host's.
collect_ignore = ["test_triton_rounds.py", "test_triton_graph.py"] if HAS_GPU else []
if HAS_GPU:
    from tests.support.gpu_in_use import gpu_is_in_use as gpu_is_in_use
