"""What a routing trace holds, without a target: for ``ep-comm trace``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ..errors import ConfigError
from ..tables import print_table
from .assemble import assemble, no_record, record_counts, survey
from .pieces import token_counts
from .problems import ProblemLog
from .readers.files import TraceFiles, find_files
from .readers.record import ALL_RANKS, Layer, Reading
from .report import print_problems
from .sample import Sample
from .target import Target

__all__ = ["Contents", "contents_facts", "print_contents", "read_contents"]


@dataclass
class Contents:
    """Facts about a trace.

    Attributes:
        files: that were read.
        ranks, steps: that occur.
        load: (token, slot) pairs of each expert, by layer.
        records, tokens: records, and (token, layer) pairs.
        empty_slots: slots without expert.
        top_k: of the first record; None where not known.
        sample: demand as traced, where the trace has complete steps for ``ep_size`` ranks.
        problems: what is wrong, found while the sample was made.
        why_no_sample: where there is none.
    """

    files: TraceFiles
    log: ProblemLog
    ranks: set[int] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)
    load: dict[Layer, np.ndarray] = field(default_factory=dict)
    records: int = 0
    tokens: int = 0
    empty_slots: int = 0
    top_k: int | None = None
    corpora: list[str] = field(default_factory=list)
    sample: Sample | None = None
    why_no_sample: str = ""


def read_contents(
    paths: list[Path], ep_size: int | None, experts: int | None, keep: tuple[str, ...], columns: dict[str, str],
    progress: Callable[[int], None] = lambda _: None,
) -> Contents:  # fmt: skip
    """Read a trace once for its contents, and once more for the demand of its steps.

    Raises:
        ConfigError, TuneError: an option is out of range, or the trace cannot be used at all: there is not one valid
            record, say.
    """
    if experts is not None:
        Target(1, num_experts=experts)
    files = find_files(paths, columns)
    contents = Contents(files, ProblemLog(keep))
    state = Reading(contents.log, experts, columns, progress=progress)
    corpora = files.corpora(state)
    if corpora is not None:
        contents.corpora = corpora.names
        contents.top_k = corpora.top_k
        contents.load = dict(zip(corpora.layers, corpora.counts_CLE.sum(0), strict=True))
        contents.why_no_sample = "counts of whole corpora have no steps"
        return contents
    for record in files.records(state):
        contents.records += 1
        contents.tokens += record.num_tokens
        contents.ranks.add(record.rank)
        contents.steps.add(record.step)
        size = state.largest_id + 1
        load = contents.load.setdefault(record.layer, np.zeros(0, dtype=np.int64))
        if load.size < size:
            load = contents.load[record.layer] = np.pad(load, (0, size - load.size))
        if record.idx_TK is None:
            load += record_counts(record, load.size)
        else:
            load += token_counts(record.idx_TK, load.size)
            contents.empty_slots += int((record.idx_TK < 0).sum())
    if not contents.records:
        raise no_record(files, contents.log)
    contents.top_k = state.top_k
    _add_sample(contents, ep_size, experts, keep, columns)
    return contents


def _add_sample(
    contents: Contents, ep_size: int | None, experts: int | None, keep: tuple[str, ...], columns: dict[str, str]
) -> None:
    log = ProblemLog(keep)
    ranks = len(contents.ranks - {ALL_RANKS})
    wanted = ep_size or ranks or 1
    try:
        seen = survey(contents.files, lambda to: Reading(to, experts, columns))
        top_k = None if contents.top_k else 1
        target = Target(wanted, num_experts=experts, top_k=top_k)
        contents.sample = assemble(contents.files, seen, target, lambda to: Reading(to, experts, columns), log)
        contents.log = log
    except (ConfigError, ValueError) as error:
        contents.why_no_sample = str(error)
        if log.problems:
            contents.log = log


def print_contents(console: Console, contents: Contents) -> None:
    """Tables for the terminal."""
    size = contents.files.total_bytes
    formats = ", ".join(sorted({form for _, form in contents.files.files}))
    console.print(
        f"\n[bold]ep-comm trace[/bold]: {len(contents.files.files)} file(s), {size / 2**20:.1f} MiB, {formats}"
    )
    if contents.corpora:
        console.print(f"counts of whole corpora: {', '.join(contents.corpora)}")
    else:
        ranks = contents.ranks - {ALL_RANKS}
        shown = f"{len(ranks)} ranks" if ranks else "summed over ranks"
        steps = f"{len(contents.steps):,} steps" + (
            f" ({min(contents.steps)} to {max(contents.steps)})" if contents.steps else ""
        )
        console.print(
            f"{contents.records:,} records, {contents.tokens:,} (token, layer) pairs, {steps}, {shown}, "
            f"top-{contents.top_k or '?'}, {contents.empty_slots:,} empty slots"
        )
    print_problems(console, contents.log.problems)
    if not contents.log.problems:
        console.print("no problems found")
    print_table(console, _load_table(contents))
    if contents.sample is None:
        console.print(f"no demand of steps: {contents.why_no_sample}")
        return
    for note in contents.sample.notes:
        console.print(f"note: {note}")


def _load_table(contents: Contents) -> Table:
    sample = contents.sample
    ranks = f" of {sample.ep_size}" if sample else ""
    table = Table(title="load, as a multiple of the mean")
    for name in (
        "layer",
        "experts",
        "busiest expert",
        "idlest",
        "unused",
        f"busiest rank{ranks}",
        "rows a step: median",
        "99\u00a0%",  # stays in one line
        "largest",
    ):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for layer, load in sorted(contents.load.items()):
        mean = max(float(load.mean()), 1e-9) if load.size else 1.0
        cells = [str(layer), str(load.size)]
        if load.size:
            cells += [
                f"{load.max() / mean:.2f} (no. {int(load.argmax())})",
                f"{load.min() / mean:.2f}",
                str(int((load == 0).sum())),
            ]
        else:
            cells += ["-", "-", "-"]
        if sample is not None and str(layer) in sample.layers:
            at = sample.layers.index(str(layer))
            of_rank, rows = sample.load_LP[at], sample.rows_SL[:, at]
            cells.append(f"{of_rank.max() / max(of_rank.mean(), 1e-9):.2f} (no. {int(of_rank.argmax())})")
            cells += [f"{value:,.0f}" for value in (np.median(rows), np.quantile(rows, 0.99), rows.max())]
        else:
            cells += ["-"] * 4
        table.add_row(*cells)
    return table


def contents_facts(contents: Contents) -> dict[str, Any]:
    """The same as plain values."""
    sample = contents.sample
    return {
        "files": [{"path": str(path), "format": form} for path, form in contents.files.files],
        "records": contents.records,
        "token_layer_pairs": contents.tokens,
        "steps": len(contents.steps),
        "ranks": sorted(contents.ranks - {ALL_RANKS}),
        "top_k": contents.top_k,
        "empty_slots": contents.empty_slots,
        "corpora": contents.corpora,
        "problems": [vars(problem) for problem in contents.log.problems],
        "expert_load": {str(layer): load.tolist() for layer, load in sorted(contents.load.items())},
        "required_rows": None
        if sample is None
        else {name: sample.rows_SL[:, at].tolist() for at, name in enumerate(sample.layers)},
        "rank_load": None if sample is None else dict(zip(sample.layers, sample.load_LP.tolist(), strict=True)),
        "why_no_required_rows": contents.why_no_sample or None,
    }
