"""CUDA kernels: compiling, caching, loading and launching them. Nothing here is needed without a GPU."""

from __future__ import annotations

from .kernels import CudaKernels, KernelError, cuda_kernels_problem
from .window import WindowLayout

__all__ = ["CudaKernels", "KernelError", "WindowLayout", "cuda_kernels_problem"]
