"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path

from rich.console import Console

from ..errors import ConfigError
from .plots import PLOTS, figure_png
from .report import print_result
from .run import TuneResult

__all__ = ["write_html"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2128; }
body { max-width: 1150px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #d0d7de; }
pre { font: 12px/1.35 ui-monospace, monospace; overflow-x: auto; }
pre { background: #f6f8fa; padding: 1em; border-radius: 6px; }
img { max-width: 100%; }
"""


def write_html(path: Path, results: list[TuneResult]) -> None:
    """Write the report of all targets.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    parts = [_section(result) for result in results]
    text = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>ep-comm tune</title>"
        f"<style>{_STYLE}</style></head><body>"
        f"<h1>ep-comm tune: receive budgets and their risk</h1>{''.join(parts)}</body></html>\n"
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _section(result: TuneResult) -> str:
    console = Console(file=io.StringIO(), width=140, highlight=False)
    print_result(console, result)
    pieces = [f"<h2>ep_size {result.sample.ep_size}</h2><pre>{escape(console.file.getvalue().strip())}</pre>"]
    for title, plot in PLOTS.items():
        figure = plot(result)
        if figure is not None:
            pieces.append(f"<h2>{escape(title)}</h2><img alt='{escape(title)}' src='{figure_png(figure)}'>")
    return "".join(pieces)
