"""``ep-comm check``: options in, ranks started if nobody has, a verdict."""

from __future__ import annotations

from typing import Annotated

from ..errors import ConfigError
from .common import OptFloat, OptInt, OptPath, check_folder, on_ranks, option

__all__ = ["check"]

_RUN, _OUTPUT, _MODEL = "What to check", "Output", "Expected times"


def check(
    ranks: Annotated[
        OptInt,
        option(
            "--ranks",
            "Processes to start here, unless torchrun, mpirun or srun did.",
            _RUN,
            show_default="one a GPU, or 2",
        ),
    ] = None,
    quick: Annotated[bool, option("--quick", "Measure briefly, about 20 s.", _RUN)] = False,
    full: Annotated[bool, option("--full", "More dtypes, alignments and inputs; measure for 5 minutes.", _RUN)] = False,
    seconds: Annotated[
        OptFloat, option("--seconds", "Begin no further measurement after this time.", _RUN, show_default="45")
    ] = None,
    timeout: Annotated[
        float, option("--timeout", "Seconds without progress after which a rank counts as stuck.", _RUN)
    ] = 120.0,
    transport: Annotated[
        str, option("--transport", "Only this one; all: every one that can be used here.", _RUN)
    ] = "all",
    capture: Annotated[
        str, option("--capture", "CUDA graphs in the replay check: auto, always or never.", _RUN)
    ] = "auto",
    device: Annotated[str, option("--device", "auto, cpu or cuda.", _RUN)] = "auto",
    json: Annotated[
        OptPath, option("--json", "Write the whole result for programs; - means to standard output.", _OUTPUT)
    ] = None,
    model: Annotated[
        bool, option("--model", "Only print expected times for larger systems; runs nothing.", _MODEL)
    ] = False,
    local_speed: Annotated[
        OptFloat, option("--local-speed", "GB/s between GPUs of a host.", _MODEL, show_default="384")
    ] = None,
    network_speed: Annotated[
        OptFloat, option("--network-speed", "GB/s of one rank to other hosts.", _MODEL, show_default="45")
    ] = None,
) -> int:
    """Check that expert parallelism works on these ranks, and how fast: environment, correctness, links, speed.

    Run it under torchrun, mpirun or srun on the hosts in question; without a
    launcher it starts its own ranks on this machine. Exit status 0: works,
    perhaps with warnings; 1: something is wrong.
    """
    if model:
        return _print_model(local_speed, network_speed)
    if quick and full:
        raise ConfigError("give --quick or --full, not both")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, got {device!r}")
    # Imported here, because torch takes seconds and --help needs none of it.
    from ..check import CheckOptions

    effort = "quick" if quick else "full" if full else "default"
    check_folder("--json", json)
    options = CheckOptions(effort, seconds, timeout, transport, capture, json)
    return on_ranks(ranks, device, lambda: _on_this_rank(options, device))


def _print_model(local_speed: float | None, network_speed: float | None) -> int:
    from ..time_model import Links, markdown_table

    given = {"local": local_speed, "network": network_speed}
    for name, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name}-speed must be above 0 and finite, in GB/s, got {value}")
    print(markdown_table(Links(**{name: value for name, value in given.items() if value is not None})))
    return 0


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
