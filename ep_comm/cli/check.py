"""``ep-comm check``: options in, ranks started if nobody has, a verdict."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from ..errors import ConfigError

__all__ = ["check"]

_RUN, _OUTPUT, _MODEL = "What to check", "Output", "Expected times"

OptPath = Optional[Path]  # noqa: UP045 - typer reads these annotations at run time, on Python 3.10 as well
OptInt = Optional[int]  # noqa: UP045
OptFloat = Optional[float]  # noqa: UP045


def _option(flag: str, text: str, panel: str, **more: object) -> object:
    return typer.Option(flag, help=text, rich_help_panel=panel, **more)


def check(
    ranks: Annotated[
        OptInt,
        _option(
            "--ranks",
            "Processes to start here, unless torchrun, mpirun or srun did.",
            _RUN,
            show_default="one a GPU, or 2",
        ),
    ] = None,
    quick: Annotated[bool, _option("--quick", "Measure briefly, about 20 s.", _RUN)] = False,
    full: Annotated[
        bool, _option("--full", "More dtypes, alignments and inputs; measure for 5 minutes.", _RUN)
    ] = False,
    seconds: Annotated[
        OptFloat, _option("--seconds", "Begin no further measurement after this time.", _RUN, show_default="45")
    ] = None,
    timeout: Annotated[
        float, _option("--timeout", "Seconds without progress after which a rank counts as stuck.", _RUN)
    ] = 120.0,
    transport: Annotated[
        str, _option("--transport", "Only this one; all: every one that can be used here.", _RUN)
    ] = "all",
    capture: Annotated[
        str, _option("--capture", "CUDA graphs in the replay check: auto, always or never.", _RUN)
    ] = "auto",
    device: Annotated[str, _option("--device", "auto, cpu or cuda.", _RUN)] = "auto",
    json: Annotated[
        OptPath, _option("--json", "Write the whole result for programs; - means to standard output.", _OUTPUT)
    ] = None,
    model: Annotated[
        bool, _option("--model", "Only print expected times for larger systems; runs nothing.", _MODEL)
    ] = False,
    local_speed: Annotated[
        OptFloat, _option("--local-speed", "GB/s between GPUs of a host.", _MODEL, show_default="384")
    ] = None,
    network_speed: Annotated[
        OptFloat, _option("--network-speed", "GB/s of one rank to other hosts.", _MODEL, show_default="45")
    ] = None,
) -> int:
    """Check that expert parallelism works on these ranks, and how fast: environment, correctness, links, speed.

    Run it under torchrun, mpirun or srun on the hosts in question; without a launcher it starts its own ranks on this
    machine. Exit status 0: works, perhaps with warnings; 1: something is wrong.
    """
    if model:
        return _print_model(local_speed, network_speed)
    if quick and full:
        raise ConfigError("give --quick or --full, not both")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, got {device!r}")
    # Imported here, because torch takes seconds and --help needs none of it.
    from ..check import CheckOptions
    from ..launchers import detect_launcher

    effort = "quick" if quick else "full" if full else "default"
    options = CheckOptions(effort, seconds, timeout, transport, capture, json)
    launched = detect_launcher(os.environ)
    if launched.launcher == "single":
        return _on_own_ranks(options, ranks, device)
    if ranks is not None and ranks != launched.world_size:
        raise ConfigError(f"--ranks {ranks}, but {launched.launcher} started {launched.world_size} ranks")
    return _on_this_rank(options, device)


def _print_model(local_speed: float | None, network_speed: float | None) -> int:
    from ..time_model import Links, markdown_table

    given = {"local": local_speed, "network": network_speed}
    print(markdown_table(Links(**{name: value for name, value in given.items() if value is not None})))
    return 0


def _on_own_ranks(options: object, ranks: int | None, device: str) -> int:
    import torch

    from ..launch import launch_ranks

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    count = (gpus or 2) if ranks is None else ranks
    if count < 1:
        raise ConfigError(f"--ranks must be at least 1, got {count}")
    return _on_this_rank(options, device) if count == 1 else launch_ranks(count, sys.argv[1:])


def _on_this_rank(options: object, device: str) -> int:
    from ..check import run_check
    from ..distributed import init_distributed, shutdown
    from ..launch import end_with_parent

    end_with_parent()
    env = init_distributed(timeout=options.timeout, device=None if device == "auto" else device)
    result = run_check(options, env)
    if result.broken:
        shutdown(failed=True)
    return int(result.failed)
