"""The kernels' source files, and a disk cache of what NVRTC made of them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path

from .nvrtc import KernelError, compile_to_cubin, nvrtc_version

__all__ = ["SCALE_FLOOR", "build", "cache_dir", "kernel_sources"]

SCALE_FLOOR = {"rceil": 0, "floor": 1}


@lru_cache(maxsize=1)
def kernel_sources() -> dict[str, str]:
    """Text of every ``.cu`` and ``.cuh`` file by name: from the installed package, else the checkout.

    Raises:
        KernelError: neither holds them.
    """
    try:
        folder = resources.files("ep_comm._kernels")
    except ModuleNotFoundError:
        folder = Path(__file__).resolve().parents[2] / "kernels"
    if not folder.is_dir():
        raise KernelError(f"the kernels' sources are missing: {folder} is no folder")
    texts = {
        entry.name: entry.read_text()
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith((".cu", ".cuh"))
    }
    if not texts:
        raise KernelError(f"the kernels' sources are missing: no .cu file in {folder}")
    return texts


def cache_dir() -> Path:
    """Folder of compiled kernels: ``EP_COMM_CACHE_DIR``, else ``ep_comm`` in the user's cache folder."""
    chosen = os.environ.get("EP_COMM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ep_comm"


def build(file: str, arch: str, defines: Mapping[str, int]) -> bytes:
    """Machine code of one source file, from the cache or freshly compiled.

    The key covers every source text, the architecture, the defines and the compiler's version. A new
    entry appears by an atomic rename, so ranks that compile the same kernel at once do not disturb each
    other. A cache that cannot be written costs time, not correctness.

    Args:
        file: name of the ``.cu`` file.
        arch: for example ``"sm_90"``.
        defines: macros and their values.
    """
    sources = kernel_sources()
    if file not in sources:
        raise KernelError(f"no kernel source named {file!r}; there are {', '.join(sources)}")
    headers = {name: text for name, text in sources.items() if name.endswith(".cuh")}
    options = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    digest = hashlib.sha256()
    for part in (repr(nvrtc_version()), arch, *options, file, sources[file], *headers, *headers.values()):
        digest.update(part.encode())
        digest.update(b"\0")
    path = cache_dir() / f"{Path(file).stem}-{arch}-{digest.hexdigest()[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code = compile_to_cubin(file, sources[file], headers, arch, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        with os.fdopen(handle, "wb") as stream:
            stream.write(code)
        os.replace(temporary, path)
    except OSError:
        pass
    return code
