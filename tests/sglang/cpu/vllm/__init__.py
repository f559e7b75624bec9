"""SGLang outside CUDA takes one operator from vLLM: its own CPU operators are not on PyPI."""
