"""Launching a loaded kernel through the CUDA driver with as little work on the host as possible.

At small batches the host limits a dispatch, and launching is most of what it does. So the bytes of a kernel's
arguments are put together by one ``struct`` call, in memory that is kept, and the driver is called directly.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .nvrtc import KernelError

__all__ = ["Launcher"]

_EMPTY = 16  # aligned, and never read
_INVALID_CONTEXT = 201
_POINTER = "P"


class Launcher:
    """One kernel, ready to be launched. Threads may launch it at the same time.

    The types of the arguments are those of the first launch: tensors and None are pointers, NumPy scalars keep their
    type, Python ints are int32.

    Args:
        name: of the kernel, for messages.
        function: its ``CUfunction``.
        arguments: of the first launch.
    """

    __slots__ = ("_free", "_function", "_name", "_offsets", "_pointers", "_struct", "shared_bytes")

    def __init__(self, name: str, function: int, arguments: Sequence[Any]) -> None:
        self._name, self._function = name, function
        codes = "".join(map(_code, arguments))
        # Native alignment, as the compiler lays out parameters.
        self._struct = struct.Struct("@" + codes)
        ends = [struct.calcsize("@" + codes[: count + 1]) for count in range(len(codes))]
        self._offsets = [end - struct.calcsize("@" + code) for end, code in zip(ends, codes, strict=True)]
        self._pointers = [place for place, code in enumerate(codes) if code == _POINTER]
        self._free: list[tuple[Any, Any, int]] = []
        self.shared_bytes = 0
        """Dynamic shared memory that the kernel was allowed so far."""

    def pack(self, arguments: Sequence[Any]) -> tuple[Any, Any, int]:
        """Memory with the arguments, an array of their addresses, and the address of that; see :meth:`give_back`."""
        values = list(arguments)
        for place in self._pointers:
            value = values[place]
            # An empty tensor has no address, but it is there: kernels take null for "not given".
            values[place] = 0 if value is None else value.data_ptr() or _EMPTY
        try:
            packed = self._free.pop()
        except IndexError:
            memory = ctypes.create_string_buffer(max(1, self._struct.size))
            start = ctypes.addressof(memory)
            pointers = (ctypes.c_void_p * max(1, len(self._offsets)))(*(start + offset for offset in self._offsets))
            packed = memory, pointers, ctypes.addressof(pointers)
        self._struct.pack_into(packed[0], 0, *values)
        return packed

    def give_back(self, packed: tuple[Any, Any, int]) -> None:
        """The memory of :meth:`pack` may be used again: the driver has copied the arguments."""
        self._free.append(packed)

    def launch(self, grid: int, block: int, arguments: Sequence[Any], shared_bytes: int, stream: int) -> None:
        """Launch on a stream of the current device.

        Raises:
            KernelError: the driver refuses; the message names its error.
        """
        packed = self.pack(arguments)
        call = (self._function, grid, 1, 1, block, 1, 1, shared_bytes, stream, packed[2], None)
        launch = _driver().cuLaunchKernel
        status = launch(*call)
        if status == _INVALID_CONTEXT:
            # A thread that has not called the CUDA runtime yet has no context; this call gives it the device's.
            torch.cuda.mem_get_info()
            status = launch(*call)
        self.give_back(packed)
        if status:
            raise KernelError(f"launching the kernel {self._name} failed: {_error_name(status)}")


def _code(value: Any) -> str:
    """The letter of ``struct`` for an argument."""
    if value is None or isinstance(value, Tensor):
        return _POINTER
    return "i" if isinstance(value, int) else np.dtype(type(value)).char


@lru_cache(maxsize=1)
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    sizes = [ctypes.c_uint] * 7
    driver.cuLaunchKernel.argtypes = [ctypes.c_void_p, *sizes, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    driver.cuLaunchKernel.restype = ctypes.c_int
    return driver


def _error_name(status: int) -> str:
    name = ctypes.c_char_p()
    if _driver().cuGetErrorName(status, ctypes.byref(name)) == 0 and name.value:
        return f"{name.value.decode()} ({status})"
    return f"CUDA error {status}"
