"""What a run has to say at its end: one dictionary of facts, shown as tables or written as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import ConfigError
from ..tables import print_table
from ..tune.budgets import BudgetFile
from .gradients import is_expert
from .loop import Trainer
from .progress import plural

__all__ = ["count_parameters", "print_report", "run_facts", "step_milliseconds", "write_json"]

_PHASE_NAMES = {
    "data": "reading text",
    "model": "forward and backward",
    "exchange": "dispatch and combine",
    "gradients": "averaging and clipping gradients",
    "optimizer": "optimizer",
    "discarded": "discarded attempts",
    "runner": "verdict, roll-back, budgets",
}


def run_facts(run: Trainer) -> dict[str, Any]:
    """Everything the tables show, as plain values. Collective; times are means over the ranks."""
    options, env, history = run.options, run.env, run.history
    tokens = options.batch_size * options.sequence_length * env.world_size
    new_steps = run.step - run.first_step
    facts: dict[str, Any] = {
        "ranks": env.world_size,
        "launcher": env.launcher,
        "backend": env.backend,
        "device": env.device.type,
        "transport": run.layers[0].dispatcher.transport,
        "mode": run.mode,
        "steps": run.step,
        "resumed_at": run.first_step,
        "replays": len(history.replayed),
        "replayed_steps": history.replayed,
        "first_loss": history.losses[0],
        "last_loss": _tail_mean(history.losses),
        "validation_loss": None,
        "tokens": tokens * run.step,
        "tokens_per_second": tokens * new_steps / max(run.seconds, 1e-9),
        "seconds": run.seconds,
        "parameters": count_parameters(run),
        "corpus_bytes": run.corpus.num_bytes,
        "layers": [vars(layer) for layer in run.runner.budgets()],
        "wire": run.wire_facts(),
        "phase_seconds": _mean_over_ranks(run),
        "captures": run.runner.captures,
        "graph_replays": run.runner.graph_replays,
        "step_milliseconds": step_milliseconds(run),
        "losses": history.losses,
        "options": {name: _plain(value) for name, value in vars(options).items()},
    }
    return facts


def print_report(console: Console, facts: dict[str, Any]) -> None:
    """Three small tables that fit 80 columns."""
    console.print()
    print_table(console, _summary(facts))
    if facts["layers"]:
        console.print()
        print_table(console, _budget_table(facts))
    if facts["wire"]:
        console.print()
        print_table(console, _wire_table(facts))
    if any(facts["phase_seconds"].values()):
        console.print()
        print_table(console, _time_table(facts))
    if facts["device"] != "cpu":
        console.print()
        print_table(console, _step_table(facts))


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Write the facts for programs to read; ``-`` is standard output.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(facts, indent=1) + "\n"
    if str(path) == "-":
        print(text, end="")
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _summary(facts: dict[str, Any]) -> Table:
    table = Table(title="Training", title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    steps = f"{facts['steps']}"
    if facts["resumed_at"]:
        steps += f" (resumed at {facts['resumed_at']})"
    table.add_row("steps", steps)
    table.add_row("loss", f"{facts['first_loss']:.3f} -> {facts['last_loss']:.3f} nats/byte (mean of the last steps)")
    if facts["validation_loss"] is not None:
        table.add_row("validation loss", f"{facts['validation_loss']:.3f} nats/byte on held-out text")
    if facts["mode"] == "static":
        replayed = facts["replayed_steps"]
        where = f" (step {_listing(replayed)})" if replayed else ""
        table.add_row("replays", f"{facts['replays']}{where}; no token was lost")
    table.add_row("speed", f"{facts['tokens_per_second']:,.0f} tokens/s over {facts['ranks']} ranks")
    table.add_row("mode", f"{facts['mode']}, {facts['transport']} transport, {facts['backend']} on {facts['device']}")
    return table


def _budget_table(facts: dict[str, Any]) -> Table:
    table = Table(title="Budget of each MoE layer, in rows a rank", title_justify="left")
    table.add_column("layer", no_wrap=True)
    for heading in ("start", "final", "required peak", "worst case", "overflows"):
        table.add_column(heading, justify="right")
    for number, layer in enumerate(facts["layers"]):
        table.add_row(
            str(number),
            f"{layer['start_rows']:,}",
            Text(f"{layer['budget_rows']:,}", style="bold"),
            f"{layer['required_peak_rows']:,}",
            f"{layer['worst_case_rows']:,}",
            str(layer["overflows"]),
        )
    return table


def _wire_table(facts: dict[str, Any]) -> Table:
    plain_name = facts["options"]["dtype"]
    table = Table(title="Token rows between the ranks, whole run, all layers", title_justify="left")
    if facts["mode"] == "static" and facts["transport"] in ("collective", "hierarchical"):
        table.caption = "Empty slots of static mode's equal splits come on top; they are not counted."
        table.caption_justify = "left"
    table.add_column("direction", no_wrap=True)
    table.add_column("format")
    table.add_column("bytes a token", justify="right")
    table.add_column("sent", justify="right")
    table.add_column(f"without MXFP8 ({plain_name})", justify="right")
    for entry in facts["wire"]:
        table.add_row(
            entry["direction"].replace("_", " "),
            entry["format"],
            str(entry["row_bytes"]),
            _megabytes(entry["bytes"]),
            _megabytes(entry["bytes_plain"]),
        )
    total, plain = (sum(entry[key] for entry in facts["wire"]) for key in ("bytes", "bytes_plain"))
    saved = f"{_megabytes(plain)} ({plain / total:.2f}x)" if total else _megabytes(plain)
    table.add_section()
    table.add_row("total", "", "", Text(_megabytes(total), style="bold"), saved)
    return table


def _time_table(facts: dict[str, Any]) -> Table:
    seconds = facts["phase_seconds"]
    steps = max(1, facts["steps"] - facts["resumed_at"])
    total = sum(seconds.values()) or 1.0
    table = Table(title="Time of a step (this process, mean over ranks)", title_justify="left")
    table.add_column("phase", no_wrap=True)
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for phase, value in seconds.items():
        table.add_row(_PHASE_NAMES[phase], f"{1e3 * value / steps:.1f}", f"{100 * value / total:.0f} %")
    return table


_STEP_NAMES = {
    "graph": "one CUDA graph",
    "plain": "without a graph",
    "replayed": "with a replay (both attempts)",
    "capturing": "that captured a graph",
}


def step_milliseconds(run: Trainer) -> dict[str, dict[str, float]]:
    """Median time and number of the steps of each kind, by this process's clock."""
    return {
        kind: {"median": 1e3 * statistics.median(seconds), "steps": len(seconds)}
        for kind, seconds in run.step_seconds.items()
    }


def _step_table(facts: dict[str, Any]) -> Table:
    table = Table(title="Time of a step (median, this process)", title_justify="left")
    table.add_column("step", no_wrap=True)
    table.add_column("number", justify="right")
    table.add_column("ms", justify="right")
    for kind, entry in sorted(facts["step_milliseconds"].items(), key=lambda item: list(_STEP_NAMES).index(item[0])):
        table.add_row(_STEP_NAMES[kind], str(entry["steps"]), f"{entry['median']:.2f}")
    table.caption = f"{plural(facts['captures'], 'graph')} captured, launched {plural(facts['graph_replays'], 'time')}"
    table.caption_justify = "left"
    return table


def _mean_over_ranks(run: Trainer) -> dict[str, float]:
    if run.env.device.type != "cpu":
        return {}  # the host's clock says nothing about where a GPU spends its time
    gathered: list[dict[str, float] | None] = [None] * run.env.world_size
    dist.all_gather_object(gathered, run.clock.totals, group=run.env.group)
    return {phase: sum(each[phase] for each in gathered) / len(gathered) for phase in gathered[0]}


def count_parameters(run: Trainer) -> int:
    """Weights of the whole model over all ranks, shared ones once."""
    weights = list(run.model.parameters())
    own = sum(weight.numel() for weight in weights if is_expert(weight))
    return sum(weight.numel() for weight in weights) - own + own * run.env.world_size


def _tail_mean(losses: list[float]) -> float:
    tail = losses[-max(1, min(10, len(losses) // 10)) :]
    return sum(tail) / len(tail)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _listing(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:8]))
    return shown if len(steps) <= 8 else f"{shown}, ..."


def _plain(value: Any) -> Any:
    if isinstance(value, BudgetFile):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value
