"""``ep-comm bench``: options in, ranks started if nobody has, a benchmark."""

from __future__ import annotations

from typing import Annotated, Any

from .common import OptFloat, OptInt, OptPath, OptStr, on_ranks, option

__all__ = ["bench"]

_RUN, _SHAPES, _WHAT, _OUTPUT = "Run", "Shapes", "What is measured", "Output"


_PRESET = "the preset's"


def bench(
    ranks: Annotated[
        OptInt,
        option(
            "--ranks",
            "Processes to start here, unless torchrun, mpirun or srun did.",
            _RUN,
            show_default="one a GPU, or 2",
        ),
    ] = None,
    preset: Annotated[
        OptStr,
        option("--preset", "quick, anchors or full.", _RUN, show_default="a minute on GPUs, tiny on CPUs"),
    ] = None,
    device: Annotated[str, option("--device", "auto, cpu or cuda.", _RUN)] = "auto",
    iterations: Annotated[
        OptInt, option("--iterations", "Timed calls of each operation.", _RUN, show_default=_PRESET)
    ] = None,
    warmup: Annotated[OptInt, option("--warmup", "Calls before them.", _RUN, show_default=_PRESET)] = None,
    seed: Annotated[int, option("--seed", "Of routing and rows.", _RUN)] = 0,
    timeout: Annotated[float, option("--timeout", "Seconds after which an operation is given up.", _RUN)] = 300.0,
    tokens: Annotated[
        OptStr, option("--tokens", "Tokens of a rank, as in 128,4096.", _SHAPES, show_default=_PRESET)
    ] = None,
    hidden: Annotated[OptStr, option("--hidden", "Elements of a row.", _SHAPES, show_default=_PRESET)] = None,
    experts: Annotated[OptStr, option("--experts", "Experts over all ranks.", _SHAPES, show_default=_PRESET)] = None,
    top_k: Annotated[OptInt, option("--top-k", "Experts of a token.", _SHAPES, show_default=_PRESET)] = None,
    routing: Annotated[OptStr, option("--routing", "uniform, skewed.", _SHAPES, show_default=_PRESET)] = None,
    skew: Annotated[float, option("--skew", "Exponent of skewed routing's Zipf law.", _SHAPES)] = 1.0,
    dtype: Annotated[
        OptStr, option("--dtype", "Rows that are copied: bf16, mxfp8, mxfp8-kept.", _WHAT, show_default=_PRESET)
    ] = None,
    mode: Annotated[OptStr, option("--mode", "eager, static, graph.", _WHAT, show_default=_PRESET)] = None,
    directions: Annotated[
        OptStr,
        option("--directions", "dispatch, combine, dispatch_backward, combine_backward.", _WHAT, show_default=_PRESET),
    ] = None,
    num_sms: Annotated[
        OptStr,
        option("--num-sms", "Multiprocessors of ep_comm's kernels, as in all,24.", _WHAT, show_default=_PRESET),
    ] = None,
    transport: Annotated[str, option("--transport", "Of ep_comm, as EPConfig has them, or all.", _WHAT)] = "all",
    contenders: Annotated[
        OptStr, option("--contenders", "Parts of names, as in symmetric,torch.", _WHAT, show_default="all")
    ] = None,
    capacity_factor: Annotated[
        OptFloat,
        option("--capacity-factor", "Static buffers, times the mean load.", _WHAT, show_default="what is needed"),
    ] = None,
    json: Annotated[OptPath, option("--json", "Write the results for programs; - is standard output.", _OUTPUT)] = None,
    plot: Annotated[OptPath, option("--plot", "Draw the results into this picture.", _OUTPUT)] = None,
) -> int:
    """Time dispatch and combine, both passes, against the link and against what else is installed.

    Without torchrun, mpirun or srun it starts its own ranks on this machine.
    """
    given = {name: value for name, value in locals().items() if value is not None and name not in ("ranks", "preset")}
    # Imported here, because torch takes seconds and --help needs none of it.
    import torch

    from ..bench.options import BenchOptions
    from ..bench.options import preset as preset_options

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    options = BenchOptions(**{**preset_options(preset, gpus > 0), **_parsed(given)})
    return on_ranks(ranks, device, lambda: _on_this_rank(options), before=options.check_world_size)


def _parsed(given: dict[str, Any]) -> dict[str, Any]:
    """Comma-separated words and numbers as tuples."""
    from ..bench.options import parse_numbers

    parsed = dict(given)
    for name in ("tokens", "hidden", "experts", "num_sms"):
        if name in parsed:
            parsed[name] = parse_numbers(f"--{name.replace('_', '-')}", parsed[name])
    for name in ("routing", "dtype", "mode", "directions", "contenders"):
        if name in parsed:
            parsed[name] = tuple(word.strip() for word in parsed[name].split(","))
    return parsed


def _on_this_rank(options: Any) -> int:
    from rich.console import Console

    from ..bench import report as reports
    from ..bench.progress import BenchProgress
    from ..bench.run import bench as run
    from ..distributed import init_distributed
    from ..launch import end_with_parent
    from .tune import _write

    end_with_parent()
    env = init_distributed(device=None if options.device == "auto" else options.device)
    to_stdout = options.json is not None and str(options.json) == "-"
    console = Console(highlight=False, stderr=to_stdout) if env.rank == 0 else None
    begun = False

    def show(report: reports.Report, shape: Any) -> None:
        nonlocal begun
        if console is None:
            return
        if not begun:
            reports.print_begin(console, report)
            begun = True
        reports.print_shape(console, report, shape)

    with BenchProgress(console) as progress:
        report = run(options, env, progress, show)
    if console is None:
        return 0
    reports.print_end(console, report)
    if to_stdout:
        print(reports.to_json(report), end="")
    elif options.json is not None:
        _write(options.json, reports.to_json(report))
    if options.plot is not None:
        from ..bench.plot import plot_report

        plot_report(options.plot, report)
        console.print(f"plot written to {options.plot}")
    return int(any(line.contender.startswith("own") for line in report.wrong))
