"""Conversions between element types, with the same bits from numpy and from torch. Knows nothing of parameters."""
