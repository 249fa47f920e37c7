"""What the commands share: kinds of options, and getting from one process to all ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import typer

from ..errors import ConfigError

__all__ = ["OptFloat", "OptInt", "OptPath", "OptStr", "check_folder", "on_ranks", "option"]

OptPath = Optional[Path]  # noqa: UP045 - typer reads these annotations at run time, on Python 3.10 as well
OptInt = Optional[int]  # noqa: UP045
OptStr = Optional[str]  # noqa: UP045
OptFloat = Optional[float]  # noqa: UP045


def option(flag: str, text: str, panel: str, **more: object) -> object:
    """An option under a heading of ``--help``."""
    return typer.Option(flag, help=text, rich_help_panel=panel, **more)


def check_folder(flag: str, path: Path | None) -> None:
    """Before work is done whose result could not be written.

    Raises:
        ConfigError: the folder of the file does not exist.
    """
    if path is not None and str(path) != "-" and not path.expanduser().resolve().parent.is_dir():
        raise ConfigError(f"{flag} {path}: the folder {path.parent} does not exist")


def on_ranks(
    ranks: int | None, device: str, run: Callable[[], int], *, before: Callable[[int], None] = lambda count: None
) -> int:
    """``run()`` as this rank of a launcher's job, or start the same program on ranks of this machine.

    Args:
        ranks: ``--ranks``; None starts one a GPU, or 2.
        device: ``"auto"`` or a torch device; ``"cpu"`` counts no GPUs.
        before: called with the number of ranks before any is started: what is wrong is then said once.

    Raises:
        ConfigError: ``ranks`` is below 1, or not what the launcher started.
    """
    from ..launchers import detect_launcher

    launched = detect_launcher(os.environ)
    if launched.launcher != "single":
        if ranks is not None and ranks != launched.world_size:
            raise ConfigError(f"--ranks {ranks}, but {launched.launcher} started {launched.world_size} ranks")
        return run()
    # Imported here, because torch takes seconds and --help needs none of it.
    import torch

    from ..launch import launch_ranks

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    count = (gpus or 2) if ranks is None else ranks
    if count < 1:
        raise ConfigError(f"--ranks must be at least 1, got {count}")
    before(count)
    return run() if count == 1 else launch_ranks(count, sys.argv[1:])
