"""What the user sees while training: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .loop import Trainer

__all__ = ["TrainingProgress", "plural", "short"]

_LINES = 10


class TrainingProgress:
    """Shows a run's progress on rank 0 and nothing on the others. A context manager; call it after each step.

    Args:
        console: where to write; ``None`` on ranks that stay silent.
        label: what is running.
        steps: steps of the whole run.
        first: steps that were already done.
    """

    def __init__(self, console: Console | None, label: str, steps: int, first: int = 0) -> None:
        self._console, self._label, self._steps, self._first = console, label, steps, first
        self._bar: Progress | None = None
        self._printed: int | None = None
        self._every = max(1, (steps - first) // _LINES)
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TextColumn("{task.fields[rate]} tok/s"),
                TextColumn("{task.fields[events]}", style="yellow"),
                TimeRemainingColumn(compact=True),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task(label, total=steps, completed=first, loss="-", rate="-", events="")

    def __call__(self, run: Trainer) -> None:
        """Take note of a finished step."""
        if self._console is None:
            return
        loss = sum(run.history.losses[-5:]) / len(run.history.losses[-5:])
        tokens = run.options.batch_size * run.options.sequence_length * run.env.world_size
        rate = tokens * (run.step - run.first_step) / max(run.seconds, 1e-9)
        events = ""
        if run.mode == "static":
            overflows = sum(layer.overflows for layer in run.runner.budgets())
            events = f"{plural(overflows, 'overflow')}, {plural(run.runner.replays, 'replay')}"
        if self._bar is not None:
            self._bar.update(self._task, completed=run.step, loss=f"{loss:.3f}", rate=short(rate), events=events)
            return
        done = run.step - self._first
        if self._printed is None or done // self._every > self._printed // self._every or run.step == self._steps:
            self._printed = done
            self._console.print(
                f"{self._label}  step {run.step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.3f}  "
                f"{short(rate)} tok/s  {events}".rstrip(),
                soft_wrap=True,
                highlight=False,
            )

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def plural(count: int, noun: str) -> str:
    """``1 replay``, ``2 replays``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def short(value: float) -> str:
    """``12345`` as ``12.3k``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"
