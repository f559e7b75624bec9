"""What crossrail's backend imports of SGLang, without SGLang: the same names and signatures, and no more.

tests/sglang/test_interface.py compares them with SGLang's own, where that is installed.
"""
