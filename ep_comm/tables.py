"""Tables whose numbers are never cut, however narrow the terminal, and where there is none.

rich cuts what does not fit with an ellipsis, and takes 80 columns where standard output is a pipe. Here headings
break between words first, then text, then the space around cells goes, then numbers break between words. What still
does not fit makes lines longer than the terminal is wide.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

__all__ = ["print_table"]

_ENDLESS = 100_000


def print_table(console: Console, table: Table) -> None:
    """Print a table whole, and change it to do so. Columns with a width keep it: the cells must fit it.

    Right-justified columns count as numbers, which break last; ``no_wrap`` keeps cells in one line whatever happens.
    """
    console.print(_Whole(table), crop=False)


class _Whole:
    """A table as :func:`print_table` prints it."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, endless = self._table, options.update_width(_ENDLESS)
        columns = [_Widths(console, endless, column) for column in table.columns]
        frame = Measurement.get(console, endless, table).maximum - sum(each.whole for each in columns)
        room = options.max_width - frame
        widths = _fitted([each.whole for each in columns], [each.numbers_whole for each in columns], room)
        # Without lines between columns the space is what keeps them apart.
        if sum(widths) > room and table.box is not None and any(table.padding[1::2]):
            table.padding = 0
            frame = Measurement.get(console, endless, table).maximum - sum(each.whole for each in columns)
            room = options.max_width - frame
            widths = _fitted(widths, [each.numbers_whole for each in columns], room)
        widths = _fitted(widths, [each.words for each in columns], room)
        for column, width in zip(table.columns, widths, strict=True):
            column.width, column.overflow = width, "fold"
            if isinstance(column.header, str):
                column.header = "\n".join(_lines(column.header, width))
        if table.collapse_padding and table.columns and any(table.padding[1::2]):
            table.columns[0].width += 1  # rich takes this column's space for collapsed too, and cuts the cells
            frame += 1
        yield from console.render(table, options.update_width(max(options.max_width, sum(widths) + frame)))


class _Widths:
    """What a column needs: for everything in one line, for numbers in one line, for the longest word."""

    def __init__(self, console: Console, options: ConsoleOptions, column: Column) -> None:
        heading = _heading(console, options, column)
        cells = [Measurement.get(console, options, cell) for cell in column.cells]
        longest, word = (max((getattr(cell, name) for cell in cells), default=0) for name in ("maximum", "minimum"))
        if column.width is not None:
            longest, word, heading = column.width, column.width, Measurement(column.width, column.width)
        self.whole = max(longest, heading.maximum, 1)
        self.numbers_whole = max(longest if column.no_wrap or column.justify == "right" else word, heading.minimum, 1)
        self.words = max(longest if column.no_wrap else word, heading.minimum, 1)


def _heading(console: Console, options: ConsoleOptions, column: Column) -> Measurement:
    if not isinstance(column.header, str):
        widest = Measurement.get(console, options, column.header).maximum
        return Measurement(widest, widest)
    words, lines = column.header.replace("\n", " ").split(" "), column.header.split("\n")
    return Measurement(max(map(cell_len, words)), max(map(cell_len, lines)))


def _fitted(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """The widths, the widest made narrower until they fit or are down to ``least``."""
    fitted = list(widths)
    for _ in range(sum(widths) - room):
        shrinkable = [at for at, width in enumerate(fitted) if width > least[at]]
        if not shrinkable:
            break
        fitted[max(shrinkable, key=lambda at: fitted[at])] -= 1
    return fitted


def _lines(heading: str, width: int) -> Iterator[str]:
    for line in heading.split("\n"):
        yield from textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
