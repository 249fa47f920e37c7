"""What the user reads on the terminal, and the same for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ..tables import print_table
from .problems import KINDS, Problem
from .run import TuneResult
from .tail import Interval

__all__ = ["per_1000", "print_problems", "print_result", "result_facts"]


def print_result(console: Console, result: TuneResult) -> None:
    """The whole answer for one target."""
    sample, target, choice = result.sample, result.request.target, result.recommendation
    console.print(
        f"\n[bold]ep-comm tune[/bold]: {sample.ep_size} ranks x {sample.tokens_per_rank:,} tokens, "
        f"{sample.num_experts} experts top-{sample.top_k}, {len(sample.layers)} MoE layers, "
        f"alignment {sample.alignment}, {target.placement} placement"
    )
    read = f"{result.pairs_read:,} (token, layer) records, " if result.pairs_read else ""
    console.print(f"trace: {len(result.files.files)} file(s), {read}{sample.num_steps:,} steps of the target")
    print_problems(console, result.problems)
    for note in sample.notes:
        console.print(f"note: {note}")
    for warning in result.warnings:
        console.print(f"[yellow]warning:[/yellow] {warning}")
    print_table(console, _layer_table(result))
    costs = result.request.costs
    run = result.run
    console.print(
        f"replays: {per_1000(choice.risk.probability)} in 1,000 steps (95 % interval) while budgets stay as they are; "
        f"with budgets growing, {_count(run.replays)} in a run of {run.steps:,} steps"
        + (
            f", {run.start_replays} of them in its first {run.start_steps} if it starts as the trace did"
            if run.start_steps
            else ""
        )
    )
    console.print(
        f"memory: {_gib(choice.chosen.memory_bytes)} for rows and their gradients in {target.dtype}, "
        f"hidden {target.hidden_size}" + (", and the exchange" if result.request.pairs else "")
    )
    console.print(
        f"cost: {choice.chosen.cost_ms:.3g} ms a step expected (padding + replays), assuming a replay costs "
        f"{costs.replay:g} ms, {costs.memory_gbps:g} GB/s memory, {costs.link_gbps:g} GB/s link"
    )
    print_table(console, _alternatives_table(result))
    _print_hold_out(console, result)


def print_problems(console: Console, problems: list[Problem]) -> None:
    """What was wrong with the trace, with the first places."""
    for problem in problems:
        kind = KINDS[problem.kind]
        fate = kind.if_kept if problem.kept else "left out"
        console.print(f"[yellow]problem:[/yellow] {problem.count:,} x {kind.text} ({problem.kind}): {fate}")
        for example in problem.examples:
            console.print(f"  {example}", markup=False)
        if not problem.kept and kind.if_kept:
            console.print(f"  --keep {problem.kind} uses it: {kind.if_kept}", style="dim")


def per_1000(interval: Interval) -> str:
    """A probability a step, as events in a thousand steps with the interval."""
    value, low, high = (_short(1000 * each) for each in (interval.value, interval.low, interval.high))
    return f"{value} [{low} to {high}]"


def _short(value: float) -> str:
    return "0" if value == 0 else "<0.001" if value < 0.001 else f"{value:.3g}"


def _count(interval: Interval) -> str:
    return f"{interval.value:,.0f} [{interval.low:,.0f} to {interval.high:,.0f}]"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.2f} MiB"


def _layer_table(result: TuneResult) -> Table:
    sample, budgets = result.sample, result.recommendation.chosen.budgets_J
    layers = len(sample.layers)
    table = Table(title="recommended budgets")
    for name in (
        "layer",
        "mean rows",
        "largest seen",
        "budget rows",
        "x mean load",
        "pair rows",
        "overflows in 1,000 steps",
        "memory",
    ):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for at, name in enumerate(sample.layers):
        rows = int(budgets[at])
        table.add_row(
            name,
            f"{sample.rows_SL[:, at].mean():,.0f}",
            f"{sample.rows_SL[:, at].max():,}",
            f"{rows:,}",
            f"{rows / sample.mean_load:.3f}",
            f"{int(budgets[layers + at]):,}" if result.request.pairs else "-",
            per_1000(result.layer_risks[at]),
            _gib(rows * result.request.target.row_bytes()),
        )
    return table


def _alternatives_table(result: TuneResult) -> Table:
    chosen = result.recommendation.chosen
    table = Table(title="alternatives")
    for name in ("choice", "rows of all layers", "memory", "replays in 1,000 steps", "cost ms a step"):
        table.add_column(name, justify="left" if name == "choice" else "right")
    layers = len(result.sample.layers)
    ours = result.recommendation.risk.probability.value
    rows = [("per layer (recommended)", chosen, ours)]
    rows += [(each.name, each.point, each.probability) for each in result.recommendation.alternatives]
    for name, point, probability in rows:
        table.add_row(
            name,
            f"{int(point.budgets_J[:layers].sum()):,}",
            _gib(point.memory_bytes),
            _short(1000 * probability),
            f"{point.cost_ms:.3g}",
        )
    return table


def _print_hold_out(console: Console, result: TuneResult) -> None:
    check = result.checked
    if check is None:
        return
    verdict = "[green]inside[/green]" if check.agrees else "[red]outside[/red]"
    console.print(
        f"hold-out: fitted on the first {check.fitted:,} steps, checked on the next {check.checked:,}: "
        f"overflows predicted {_count(check.predicted.overflows)}, observed {check.observed.overflows}; "
        f"replays with growth predicted {_count(check.predicted.replays)}, observed {check.observed.replays}; "
        f"rows at the end predicted {_count(check.predicted.final_rows)}, observed {check.observed_rows:,}: "
        f"{verdict} the intervals"
    )


def result_facts(result: TuneResult) -> dict[str, Any]:
    """The answer as plain values."""
    choice, check, sample = result.recommendation, result.checked, result.sample
    layers = len(sample.layers)
    facts = {
        "files": [str(path) for path, _ in result.files.files],
        "records": result.pairs_read,
        "problems": [vars(problem) for problem in result.problems],
        "target": vars(result.request.target),
        "source": sample.source,
        "steps": sample.num_steps,
        "notes": sample.notes,
        "warnings": result.warnings,
        "budgets": {**vars(result.budget_file()), "replays_per_1000": vars(result.budget_file().replays_per_1000)},
        "memory_bytes": choice.chosen.memory_bytes,
        "cost_ms": choice.chosen.cost_ms,
        "replay_probability": vars(choice.risk.probability),
        "run": _forecast_facts(result.run),
        "alternatives": [
            {
                "name": each.name,
                "rows": [int(rows) for rows in each.point.budgets_J[:layers]],
                "memory_bytes": each.point.memory_bytes,
                "replay_probability": each.probability,
                "cost_ms": each.point.cost_ms,
            }
            for each in choice.alternatives
        ],
        "hold_out": None,
    }
    facts["budgets"]["layers"] = [
        {**vars(layer), "overflows_per_1000": vars(layer.overflows_per_1000)} for layer in result.budget_file().layers
    ]
    if check is not None:
        facts["hold_out"] = {
            "fitted_steps": check.fitted,
            "checked_steps": check.checked,
            "predicted": _forecast_facts(check.predicted),
            "observed": {
                "overflows": check.observed.overflows,
                "replays": check.observed.replays,
                "final_rows": check.observed_rows,
            },
            "agrees": check.agrees,
        }
    return facts


def _forecast_facts(run: Any) -> dict[str, Any]:
    return {
        "steps": run.steps,
        "start_steps": run.start_steps,
        "start_replays": run.start_replays,
        "overflows": vars(run.overflows),
        "replays": vars(run.replays),
        "final_rows": vars(run.final_rows),
    }
