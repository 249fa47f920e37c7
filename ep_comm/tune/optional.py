"""scipy and matplotlib, which only tuning needs: imported when used, one clear error where they are missing."""

from __future__ import annotations

from types import ModuleType

from ..errors import ConfigError
from ..extras import install_hint

__all__ = ["pyplot", "scipy_stats"]


def scipy_stats() -> ModuleType:
    """``scipy.stats``."""
    try:
        from scipy import stats
    except ImportError:
        raise ConfigError(f"tuning needs scipy: {install_hint('tune')}") from None
    return stats


def pyplot() -> ModuleType:
    """``matplotlib.pyplot``, drawing into files only."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        raise ConfigError(f"plots need matplotlib: {install_hint('tune')}") from None
    return plt
