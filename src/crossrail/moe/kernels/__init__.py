"""Kernels of dispatch and combine: one interface, one module for each implementation."""

from crossrail.moe.kernels.cpu import CpuKernels, cpu_levels
from crossrail.moe.kernels.interface import Kernels

__all__ = ["CpuKernels", "Kernels", "cpu_levels"]
