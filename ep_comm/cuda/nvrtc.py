"""NVRTC, the run-time compiler of CUDA C++, through ctypes.

The library comes with every CUDA build of torch (the wheel ``nvidia-cuda-nvrtc``) and with the CUDA
toolkit. It needs neither a GPU nor a driver, so the kernels also compile where there is none.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from ..errors import EPError

__all__ = ["KernelError", "compile_to_cubin", "find_nvrtc", "nvrtc_version"]

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class KernelError(EPError):
    """A CUDA kernel cannot be compiled or loaded."""


def _candidates() -> list[str]:
    """Where the library may be: the wheels beside torch, then the loader's own path, then the toolkit."""
    found: list[str] = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        found += sorted(map(str, Path(root).glob("*/lib/libnvrtc.so.*")), reverse=True)
    found += _SONAMES
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found += [str(Path(toolkit) / "lib64" / name) for name in _SONAMES]
    return found


@lru_cache(maxsize=1)
def find_nvrtc() -> ctypes.CDLL:
    """Load NVRTC.

    Raises:
        KernelError: no copy of the library could be loaded.
    """
    for name in _candidates():
        try:
            # NVRTC opens its builtins by bare name; loaded beforehand, they are found beside it too.
            for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")) if "/" in name else ():
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise KernelError(
        "NVRTC (libnvrtc) was not found: install the CUDA build of torch, the package "
        "nvidia-cuda-nvrtc, or the CUDA toolkit and point CUDA_HOME at it"
    )


@lru_cache(maxsize=1)
def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the loaded NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(find_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def compile_to_cubin(
    name: str, source: str, headers: Mapping[str, str], arch: str, options: Sequence[str] = ()
) -> bytes:
    """Compile CUDA C++ to machine code.

    Args:
        name: file name for messages.
        source: text of the translation unit.
        headers: texts of the files it may include, by the name used in ``#include``.
        arch: real architecture, for example ``"sm_90"``.
        options: further NVRTC options, for example ``"-DDTYPE=1"``.

    Raises:
        KernelError: the compiler refused; the message holds its log.
    """
    lib = find_nvrtc()
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(key.encode() for key in headers))
    _check(
        lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names),
        "nvrtcCreateProgram",
    )
    try:
        flags = [f"--gpu-architecture={arch}", "--std=c++17", *options]
        array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if lib.nvrtcCompileProgram(program, len(flags), array):
            log = _read(lib, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
            text = log.decode(errors="replace").rstrip("\0\n")
            raise KernelError(f"{name} does not compile for {arch} with {' '.join(options)}:\n{text}")
        return _read(lib, program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _read(lib: ctypes.CDLL, program: ctypes.c_void_p, size_of: str, get: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(lib, size_of)(program, ctypes.byref(size)), size_of)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(lib, get)(program, buffer), get)
    return buffer.raw


def _check(status: int, call: str) -> None:
    if status:
        lib = find_nvrtc()
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise KernelError(f"{call} failed: {lib.nvrtcGetErrorString(status).decode()}")
