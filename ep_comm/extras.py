"""How an extra of this package is installed: said in many errors, written once."""

from __future__ import annotations

__all__ = ["install_hint"]


def install_hint(extra: str) -> str:
    """The command that installs ``extra``. ep_comm is on no package index, so it is one for its repository."""
    return f"pip install -e '.[{extra}]' in ep_comm's repository"
