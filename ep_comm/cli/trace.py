"""``ep-comm trace``: what is in a routing trace, and what is wrong with it."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from .common import OptInt, OptPath
from .tune import parse_columns, reading_progress

__all__ = ["trace"]


def trace(
    traces: Annotated[list[Path], typer.Argument(help="Files, folders, or the name that rank files share.")],
    ep_size: Annotated[
        OptInt, typer.Option("--ep-size", help="Ranks to show the load of.", show_default="the trace's")
    ] = None,
    experts: Annotated[
        OptInt, typer.Option("--experts", help="Experts of a layer.", show_default="from the trace")
    ] = None,
    keep: Annotated[list[str], typer.Option("--keep", help="Use data with this problem all the same.")] = [],  # noqa: B006
    column: Annotated[list[str], typer.Option("--column", help="Another name of a field, OURS=THEIRS.")] = [],  # noqa: B006
    json: Annotated[OptPath, typer.Option("--json", help="Write the facts for programs; - is standard output.")] = None,
) -> int:
    """Show what a routing trace holds: steps, ranks, load of experts and ranks, and its problems."""
    from rich.console import Console

    from ..tune.contents import contents_facts, print_contents, read_contents
    from .tune import _write

    columns = parse_columns(column)
    with reading_progress(traces, columns) as progress:
        contents = read_contents(traces, ep_size, experts, tuple(keep), columns, progress)
    to_stdout = json is not None and str(json) == "-"
    print_contents(Console(highlight=False, stderr=to_stdout), contents)
    if json is not None:
        text = json_module.dumps(contents_facts(contents), indent=1, default=str)
        if to_stdout:
            print(text)
        else:
            _write(json, text + "\n")
    return 0
