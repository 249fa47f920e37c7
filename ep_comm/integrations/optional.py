"""Packages that only an integration needs: imported when it is used, one clear error otherwise."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from types import ModuleType

from ..errors import EPError

__all__ = ["MissingPackageError", "require"]


class MissingPackageError(EPError, ImportError):
    """A package that an integration needs is missing or too old; the message names the version needed."""


def require(distribution: str, version: str, module: str, *, hint: str) -> ModuleType:
    """Import ``module``, or say what to install.

    Args:
        distribution: the package's name on PyPI.
        version: the oldest release that will do, digits and dots.
        module: to import, dotted.
        hint: the command that installs it.

    Raises:
        MissingPackageError: the package is missing, older than ``version``, or cannot be imported.
    """
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise MissingPackageError(
            f"this integration needs {distribution} >= {version}, which is not installed: {hint}"
        ) from None
    if _release(found) < _release(version):
        raise MissingPackageError(f"this integration needs {distribution} >= {version}, got {found}: {hint}")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{distribution} {found} is installed, but importing {module} fails ({error}); this integration needs "
            f"{distribution} >= {version}: {hint}"
        ) from error


def _release(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: 5.23.0rc1 counts as 5.23.0."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else (0,)
