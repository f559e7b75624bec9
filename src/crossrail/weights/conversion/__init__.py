"""Conversions between element types, bit-identical in numpy and torch. Knows nothing of parameters."""
