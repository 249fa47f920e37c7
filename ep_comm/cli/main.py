"""The ``ep-comm`` program: its commands, and how errors become one line and an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import typer

from ..errors import ConfigError, EPError
from .bench import bench
from .check import check
from .trace import trace
from .train import train
from .tune import tune

__all__ = ["app", "main"]

USAGE_ERROR = 2
CLOSED_PIPE = 141  # as of a program that SIGPIPE ended

app = typer.Typer(
    name="ep-comm",
    help="Expert-parallel dispatch and combine for Mixture-of-Experts models.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _program() -> None:
    """Expert-parallel dispatch and combine for Mixture-of-Experts models."""


app.command("train")(train)
app.command("tune")(tune)
app.command("trace")(trace)
app.command("check")(check)
app.command("bench")(bench)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program and exit: 0, 1 for a failure, 2 for a bad option, 130 for Ctrl-C, 141 for a closed pipe."""
    status = run(sys.argv[1:] if argv is None else list(argv))
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        status = _reader_gone()
    if status and "RANK" in os.environ:
        # A rank that failed while others were still talking to it: PyTorch's own threads do not always survive
        # the end of the interpreter then ("terminate called without an active exception"), and the launcher
        # would report a crash instead of this status.
        os._exit(status)
    sys.exit(status)


def run(argv: Sequence[str]) -> int:
    """Run the program; returns the exit status."""
    try:
        return int(app(args=list(argv) or ["--help"], prog_name="ep-comm", standalone_mode=False) or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # which rich turns into an exit
            return _reader_gone()
        raise
    except ConfigError as error:
        return _fail(str(error), USAGE_ERROR)
    except EPError as error:
        return _fail(str(error), 1)
    except Exception as error:
        # typer may bring its own copy of click, so its usage errors are known by what they can do.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            context = getattr(error, "ctx", None)
            program = context.command_path if context is not None else "ep-comm"
            return _fail(f"{error.format_message().rstrip('.')}; see {program} --help", error.exit_code)
        return _fail(f"unexpected {type(error).__name__}\n{traceback.format_exc().rstrip()}", 1)


def _reader_gone() -> int:
    """Nobody reads the output any more (``ep-comm train | head``): end as quietly as the shell's own programs do."""
    # What is still in the buffers must not be tried again when the interpreter ends.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    if "torch.distributed" in sys.modules:
        from ..distributed import first_failure, shutdown

        first_failure()  # the ranks that this one takes along have nothing to say about it either
        shutdown(failed=True)
    return CLOSED_PIPE


def _fail(message: str, status: int) -> int:
    """Say what is wrong, on one rank only: the first to fail speaks for those it takes along."""
    if "torch.distributed" in sys.modules:
        from ..distributed import first_failure, shutdown

        if first_failure():
            _say(message)
        shutdown(failed=True)
    else:
        _say(message)
    return status


def _say(message: str) -> None:
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank is not None and "rank" not in message else ""
    print(f"ep-comm: error{where}: {message}", file=sys.stderr, flush=True)
