"""torchtitan where there is no Triton, which the CPU build of torch does not bring.

torchtitan imports Triton for the kernels of one of its own dispatchers, which need GPUs. Here nothing runs them.
"""

from __future__ import annotations

import importlib.util
import sys
from unittest import mock

from ep_comm.extras import install_hint

_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def missing() -> str:
    """Why torchtitan cannot be used in this process; empty if it can."""
    if importlib.util.find_spec("torchtitan") is None:
        return f"needs torchtitan >= 0.3.0: {install_hint('torchtitan')}"
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(_KERNELS, mock.MagicMock())
    try:
        import ep_comm.integrations.torchtitan  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""
