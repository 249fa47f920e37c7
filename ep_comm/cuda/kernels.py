"""Compiled kernels of one device, and launching them on torch's current stream."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .driver import Launcher
from .nvrtc import KernelError, find_nvrtc
from .sources import build

__all__ = ["CudaKernels", "KernelError", "cuda_kernels", "cuda_kernels_problem", "vector_bytes"]

DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STATIC_SHARED_LIMIT = 40 * 1024  # dynamic shared memory that needs no permission, beside some static
_STATIC_SHARED_ROOM = 4 * 1024
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@lru_cache(maxsize=1)
def cuda_kernels_problem() -> str | None:
    """Why the CUDA kernels cannot be used here, or None if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        major = (torch.version.cuda or "13").split(".")[0]
        return f"CuPy cannot be imported ({error}); install cupy-cuda{major}x"
    try:
        find_nvrtc()
    except KernelError as error:
        return str(error)
    return None


def vector_bytes(row_bytes: int, *tensors: Tensor) -> int:
    """The widest access, 16 bytes or less, to which rows of ``row_bytes`` and all tensors are aligned."""
    together = row_bytes | 16
    for tensor in tensors:
        together |= tensor.data_ptr()
    return together & -together


class CudaKernels:
    """Kernels for one device; compiled at first use, from the disk cache if they are there.

    Args:
        device: a CUDA device.

    Raises:
        KernelError: the kernels cannot be used here; the message says what is missing.
    """

    def __init__(self, device: torch.device) -> None:
        problem = cuda_kernels_problem()
        if problem is not None:
            raise KernelError(f"the CUDA kernels cannot be used: {problem}")
        properties = torch.cuda.get_device_properties(device)
        if properties.major < 9:
            raise KernelError(
                f"the CUDA kernels need compute capability 9.0 or higher, {device} ({properties.name}) has "
                f"{properties.major}.{properties.minor}"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.arch = f"sm_{properties.major}{properties.minor}"
        self.num_sms = properties.multi_processor_count
        self._functions: dict[tuple[Any, ...], Any] = {}
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._shared_bytes: dict[tuple[Any, ...], int] = {}
        self._launchers: dict[tuple[Any, ...], Launcher] = {}
        self.most_shared_bytes = (
            getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
            - _STATIC_SHARED_ROOM
        )
        """Dynamic shared memory that a block may have, beside what kernels declare themselves."""

    def function(self, file: str, name: str, defines: Mapping[str, int], shared_bytes: int = 0) -> Any:
        """Kernel ``name`` of ``file`` built with ``defines``, allowed ``shared_bytes`` of shared memory."""
        key = (file, name, tuple(sorted(defines.items())))
        function = self._functions.get(key)
        if function is None:
            import cupy

            with cupy.cuda.Device(self.device.index):
                module = self._modules.get(key[::2])
                if module is None:
                    module = cupy.cuda.function.Module()
                    module.load(build(file, self.arch, defines))
                    self._modules[key[::2]] = module
                function = self._functions[key] = module.get_function(name)
        # What a function may take is raised only: a launch with less needs no other permission.
        if shared_bytes > self._shared_bytes.get(key, _STATIC_SHARED_LIMIT):
            import cupy

            with cupy.cuda.Device(self.device.index):
                cupy.cuda.driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, shared_bytes)
            self._shared_bytes[key] = shared_bytes
        return function

    def launch(
        self,
        file: str,
        name: str,
        defines: Mapping[str, int],
        grid: int,
        block: int,
        arguments: tuple[Any, ...],
        shared_bytes: int = 0,
    ) -> None:
        """Launch a kernel on torch's current stream of the device.

        Arguments: tensors and None become pointers, NumPy scalars keep their type, Python ints are int32. Every launch
        of a kernel has to have the types of its first.

        Raises:
            KernelError: it cannot be compiled, or the driver refuses.
        """
        launcher = self._launchers.get((file, name, *defines.items()))
        if launcher is None or shared_bytes > launcher.shared_bytes:
            function = self.function(file, name, defines, shared_bytes)
            launcher = self._launchers.setdefault(
                (file, name, *defines.items()), Launcher(name, function.ptr, arguments)
            )
            launcher.shared_bytes = max(launcher.shared_bytes, shared_bytes)
        index = self.device.index
        if _current_device() == index:
            launcher.launch(grid, block, arguments, shared_bytes, _raw_stream(index))
            return
        with torch.cuda.device(index):
            launcher.launch(grid, block, arguments, shared_bytes, _raw_stream(index))


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# Without an object for the stream and without asking whether CUDA is initialised, if this PyTorch has such functions:
# the others cost more than the launch.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


@cache
def cuda_kernels(device: torch.device) -> CudaKernels | None:
    """The kernels of a device, shared by all that use them; None where they cannot be used."""
    if device.type != "cuda" or cuda_kernels_problem() is not None:
        return None
    try:
        return CudaKernels(device)
    except KernelError:
        return None
