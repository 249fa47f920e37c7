"""What rank 0 shows while it measures: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["BenchProgress"]


class BenchProgress:
    """A context manager.

    Args:
        console: where results are printed, so that the bar stays below them; where that is no terminal, the bar
            goes to standard error. None on ranks that stay silent.
    """

    def __init__(self, console: Console | None) -> None:
        self._bar: Progress | None = None
        if console is not None and not console.is_terminal:
            console = Console(stderr=True)
        if console is not None and console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("getting ready", total=None)

    def start(self, total: int) -> None:
        """So many parts are to be measured."""
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def __call__(self, text: str) -> None:
        """This is measured now."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def advance(self, parts: int = 1) -> None:
        """So many parts are done."""
        if self._bar is not None:
            self._bar.advance(self._task, parts)

    def __enter__(self) -> BenchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
