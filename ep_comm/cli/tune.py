"""``ep-comm tune``: traces in, budgets out."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from .common import OptFloat, OptInt, OptPath, check_folder, option

if TYPE_CHECKING:
    from ..tune.run import TuneRequest, TuneResult

__all__ = ["parse_columns", "reading_progress", "tune"]

_TRACE, _TARGET, _LIMITS, _OUTPUT, _MODEL = "Trace", "Target", "Limits and costs", "Output", "Model"


def tune(
    traces: Annotated[list[Path], typer.Argument(help="Files, folders, or the name that rank files share.")],
    ep_size: Annotated[list[int], option("--ep-size", "Ranks of an EP group; may be given several times.", _TARGET)],
    tokens_per_rank: Annotated[
        OptInt, option("--tokens-per-rank", "Tokens a rank dispatches at once.", _TARGET, show_default="the trace's")
    ] = None,
    hidden: Annotated[int, option("--hidden", "Elements of a token row.", _TARGET)] = 4096,
    alignment: Annotated[int, option("--alignment", "Rows to which an expert's segment is padded.", _TARGET)] = 16,
    dtype: Annotated[str, option("--dtype", "Of the rows: bf16, fp16 or fp32.", _TARGET)] = "bf16",
    placement: Annotated[
        str, option("--placement", "contiguous, round-robin, or a JSON file with the rank of each expert.", _TARGET)
    ] = "contiguous",
    steps: Annotated[int, option("--steps", "Steps of a run.", _TARGET)] = 10_000,
    experts: Annotated[
        OptInt, option("--experts", "Experts of a layer.", _TARGET, show_default="from the trace")
    ] = None,
    top_k: Annotated[OptInt, option("--top-k", "Experts a token, where the trace holds only counts.", _TARGET)] = None,
    transport: Annotated[
        str, option("--transport", "auto, collective, hierarchical tune pair_rows too; symmetric has none.", _TARGET)
    ] = "auto",
    max_memory: Annotated[
        OptFloat, option("--max-memory", "GiB a rank for the buffers of all layers.", _LIMITS)
    ] = None,
    replays_per_1000: Annotated[
        OptFloat, option("--replays-per-1000", "Most replays in a thousand steps.", _LIMITS)
    ] = None,
    step_ms: Annotated[float, option("--step-ms", "Time of a training step.", _LIMITS)] = 1000.0,
    replay_ms: Annotated[
        OptFloat, option("--replay-ms", "What a replay adds.", _LIMITS, show_default="--step-ms")
    ] = None,
    memory_gbps: Annotated[
        float, option("--memory-gbps", "Memory bandwidth in GB/s: what padding rows cost.", _LIMITS)
    ] = 3000.0,
    link_gbps: Annotated[
        float, option("--link-gbps", "Bandwidth between ranks in GB/s: what unused pair rows cost.", _LIMITS)
    ] = 50.0,
    headroom: Annotated[float, option("--headroom", "Of StepRunner, for forecasts with growth.", _LIMITS)] = 0.1,
    keep: Annotated[
        list[str], option("--keep", "Use data with this problem all the same; see ep-comm trace.", _TRACE)
    ] = [],  # noqa: B006
    column: Annotated[list[str], option("--column", "Another name of a field, OURS=THEIRS.", _TRACE)] = [],  # noqa: B006
    document_tokens: Annotated[
        int, option("--document-tokens", "Tokens of a document, for counts of whole corpora.", _MODEL)
    ] = 2048,
    concentration: Annotated[
        OptFloat, option("--concentration", "How alike documents of a corpus are.", _MODEL, show_default="estimated")
    ] = None,
    holdout_share: Annotated[
        float, option("--fit-share", "Part of the steps that the hold-out check fits.", _MODEL)
    ] = 0.5,
    seed: Annotated[int, option("--seed", "Of bootstrap and simulation.", _MODEL)] = 0,
    budget: Annotated[
        OptPath, option("--budget", "Write the budgets here, for ep-comm train --budget and EPConfig.", _OUTPUT)
    ] = None,
    html: Annotated[OptPath, option("--html", "Write a report with plots here.", _OUTPUT)] = None,
    json: Annotated[
        OptPath, option("--json", "Write the whole answer for programs; - is standard output.", _OUTPUT)
    ] = None,
) -> int:
    """Recommend the receive budget of every layer from routing traces, with its risk.

    Reads router traces (JSON lines, one file a rank), token tables (CSV, JSON lines) and counts (JSON, .npz).
    """
    from ..tune.recommend import CostModel
    from ..tune.run import TuneRequest
    from ..tune.target import Target

    if transport not in ("auto", "collective", "symmetric", "hierarchical"):
        raise ConfigError(f"--transport must be auto, collective, symmetric or hierarchical, got {transport!r}")
    if budget is not None and len(ep_size) > 1:
        raise ConfigError(f"--budget holds the budgets of one --ep-size, got {len(ep_size)}")
    for flag, path in (("--budget", budget), ("--html", html), ("--json", json)):
        check_folder(flag, path)
    targets = [
        Target(each, tokens_per_rank, hidden, alignment, dtype, placement, steps, experts, top_k) for each in ep_size
    ]
    requests = [
        TuneRequest(
            paths=traces,
            target=target,
            costs=CostModel(step_ms, replay_ms, memory_gbps, link_gbps),
            max_memory=None if max_memory is None else max_memory * 2**30,
            replays_per_1000=replays_per_1000,
            headroom=headroom,
            pairs=transport != "symmetric",
            share=holdout_share,
            keep=tuple(keep),
            columns=parse_columns(column),
            document_tokens=document_tokens,
            concentration=concentration,
            seed=seed,
        )
        for target in targets
    ]
    _answer(requests, budget, html, json)
    return 0


def _answer(requests: list[TuneRequest], budget: Path | None, html: Path | None, json: Path | None) -> None:
    from rich.console import Console

    from ..tune.report import print_result, result_facts

    to_stdout = json is not None and str(json) == "-"
    console = Console(highlight=False, stderr=to_stdout)
    results = [_run(request) for request in requests]
    for result in results:
        print_result(console, result)
    if budget is not None:
        results[0].budget_file().save(budget)
        console.print(f"budgets written to {budget}")
    if html is not None:
        from ..tune.html import write_html

        write_html(html, results)
        console.print(f"report written to {html}")
    if json is not None:
        text = json_module.dumps([result_facts(result) for result in results], indent=1, default=str)
        if to_stdout:
            print(text)
        else:
            _write(json, text + "\n")


def _run(request: TuneRequest) -> TuneResult:
    from ..tune.run import tune as run

    with reading_progress(request.paths, request.columns) as progress:
        return run(request, progress)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def parse_columns(pairs: list[str]) -> dict[str, str]:
    """``OURS=THEIRS`` options as a dictionary."""
    columns = {}
    for pair in pairs:
        ours, separator, theirs = pair.partition("=")
        if not (ours and separator and theirs):
            raise ConfigError(f"--column must be OURS=THEIRS, as in --column step=iteration, got {pair!r}")
        columns[ours] = theirs
    return columns


class reading_progress:  # noqa: N801 - used as a function that opens a context
    """A progress bar over the bytes of the traces, on a terminal's standard error; nothing elsewhere."""

    def __init__(self, paths: list[Path], columns: dict[str, str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        from ..tune.readers.files import find_files

        total = find_files(paths, columns).total_bytes
        console = Console(stderr=True)
        parts = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn(compact=True))
        self._bar = Progress(*parts, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("reading", total=total)

    def __enter__(self) -> reading_progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, size: int) -> None:
        self._bar.advance(self._task, size)
