"""scipy and matplotlib, which only tuning needs: imported when used, one clear error where they are missing."""

from __future__ import annotations

from types import ModuleType

from ..errors import ConfigError

__all__ = ["pyplot", "scipy_stats"]


def scipy_stats() -> ModuleType:
    """``scipy.stats``."""
    try:
        from scipy import stats
    except ImportError:
        raise ConfigError("tuning needs scipy: install the extra, pip install 'ep-comm[tune]'") from None
    return stats


def pyplot() -> ModuleType:
    """``matplotlib.pyplot``, drawing into files only."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        raise ConfigError("plots need matplotlib: install the extra, pip install 'ep-comm[tune]'") from None
    return plt
