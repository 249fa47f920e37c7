"""The whole of ``ep-comm check`` on one rank."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..dispatcher import Dispatcher
from ..distributed import Env
from ..errors import ConfigError
from .correctness import cases, open_transports, run_case
from .environment import compare_environments, environment
from .findings import Finding, ranges
from .pairs import classify, judge_pairs, measure_pairs, schedule
from .replay import check_replay
from .report import Progress, print_json, print_report
from .result import CheckResult
from .speed import measure_transport, standard_shape, summarise
from .stages import StageError, Stages

__all__ = ["CheckOptions", "run_check"]

_EFFORTS = ("quick", "default", "full")
_DEFAULT_SECONDS = {"quick": 20.0, "default": 45.0, "full": 300.0}


@dataclass(frozen=True)
class CheckOptions:
    """What to check, and for how long.

    Attributes:
        effort: ``"quick"`` measures briefly, ``"full"`` also checks more dtypes and alignments.
        seconds: measuring stops after about so many seconds since the start of the check; None: by effort.
        timeout: a rank that makes no progress for so many seconds is reported as stuck.
        transport: only this one; ``"all"``: every one that is usable.
        capture: CUDA graphs in the replay check: ``"auto"``, ``"always"`` or ``"never"``.
        json: file for the whole result, ``"-"`` for standard output instead of tables.
    """

    effort: str = "default"
    seconds: float | None = None
    timeout: float = 120.0
    transport: str = "all"
    capture: str = "auto"
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.effort not in _EFFORTS:
            raise ConfigError(f"effort must be one of {', '.join(_EFFORTS)}, got {self.effort!r}")
        for name in ("seconds", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be above 0, got {value!r}")
        if self.capture not in ("auto", "always", "never"):
            raise ConfigError(f"capture must be auto, always or never, got {self.capture!r}")

    @property
    def time_limit(self) -> float:
        """Seconds after which nothing new is measured."""
        return _DEFAULT_SECONDS[self.effort] if self.seconds is None else self.seconds


def run_check(
    options: CheckOptions,
    env: Env,
    console: Console | None = None,
    prepare: Callable[[Dispatcher], None] | None = None,
) -> CheckResult:
    """Check all ranks of the job. Collective; on ranks other than 0 the result holds the verdict only.

    If a rank is stuck the report is shown and all processes end with status 1, because a blocked collective cannot be
    left otherwise.

    Args:
        console: for progress and report on rank 0; None takes standard output.
        prepare: called with every dispatcher before it is used, to wrap its transport for example.
    """
    if env.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return _Check(options, env, console, prepare).run()


class _Check:
    """One run on one rank."""

    def __init__(
        self,
        options: CheckOptions,
        env: Env,
        console: Console | None,
        prepare: Callable[[Dispatcher], None] | None,
    ) -> None:
        self.options, self.env, self.prepare = options, env, prepare
        self.result = CheckResult(ranks=env.world_size)
        self.console = (console or Console(highlight=False)) if env.rank == 0 else None
        self.quiet = str(options.json) == "-"
        self.progress = Progress(None if self.quiet else self.console)
        self.started = time.perf_counter()
        self.stages = Stages(env, options.timeout, self._give_up)
        self.hosts: list[list[int]] = []
        self._reporting = threading.Lock()
        self._reported = False

    def run(self) -> CheckResult:
        if self.console is not None and not self.quiet:
            self.console.print(
                f"[bold]ep-comm check[/bold]: {self.env.world_size} rank{'s' if self.env.world_size > 1 else ''} over "
                f"{self.env.backend} on {self.env.device.type}, started by {_starter(self.env)}"
            )
        with self.stages:
            try:
                self._all_stages()
                self.result.complete = True
            except StageError as error:
                self.result.broken = True
                self.result.findings += error.findings
            self._report()
            if self.stages.share_verdict(self.result.failed) and self.env.rank != 0:
                self.result.complete = False
        return self.result

    # -- stages --------------------------------------------------------------------------------------

    def _all_stages(self) -> None:
        self._environment()
        names = self._transports()
        for name in names:
            self._correctness(name)
        for name in names:
            self._replay(name)
        if self.env.world_size > 1:
            self._pairs(peer_memory="symmetric" in names)
        self._speed(names)

    def _environment(self) -> None:
        with self.progress.stage("environment") as notes:
            values, _ = self._stage("environment", lambda: environment(self.env))
            if self.console is not None:
                self.result.facts = values
                self.result.findings += compare_environments(values)
                hosts = len(set(self.result.hosts))
                notes.append(f"{hosts} host{'s' if hosts > 1 else ''}")

    def _transports(self) -> list[str]:
        """The transports to check, the same on all ranks."""
        with self.progress.stage("transports") as notes:
            values, findings = self._stage("opening the transports", lambda: open_transports(self.env))
            if findings:
                raise StageError("opening the transports", [])
            offer = values[0]
            problems, auto, self.hosts = offer.problems, offer.auto, offer.hosts
            self.result.transports, self.result.auto = problems, auto
            usable = [name for name, problem in problems.items() if not problem]
            if auto == "local":
                usable = usable[:1]  # a single rank has no other ranks to reach in another way
            notes.append(f"usable: {', '.join(usable)}")
        wanted = self.options.transport
        if wanted != "all" and wanted not in usable:
            reason = problems.get(wanted, f"must be one of {', '.join(problems)}")
            raise ConfigError(f"--transport {wanted} cannot be used here: {reason}")
        if self.console is not None and problems.get("symmetric") and self._one_host_of_gpus():
            reason = f"the symmetric transport cannot be used: {problems['symmetric']}"
            self.result.findings.append(Finding("symmetric-unavailable", reason))
        return usable if wanted == "all" else [wanted]

    def _one_host_of_gpus(self) -> bool:
        return self.env.backend == "nccl" and len(set(self.result.hosts)) == 1

    def _correctness(self, transport: str) -> None:
        todo = list(cases(transport, full=self.options.effort == "full"))

        def work() -> list[Any]:
            done = []
            for case in todo:
                self.stages.progress(f"{case.mode} {case.wire} {case.dtype}")
                done.append(run_case(self.env, case, self.hosts, self.prepare))
            return done

        with self.progress.stage(f"correctness, {transport}") as notes:
            values, _ = self._stage(f"correctness of the {transport} transport", work)
            if self.console is None:
                return
            found = [result for of_rank in values for result in of_rank]
            self.result.cases += found
            wrong = len({result.case for result in found if result.wrong})
            notes.append(f"[bold red]{wrong} of {len(todo)} cases wrong[/]" if wrong else f"{len(todo)} cases right")
            if not values:
                notes[:] = ["[bold red]failed[/]"]

    def _replay(self, transport: str) -> None:
        with self.progress.stage(f"overflow, {transport}") as notes:
            values, _ = self._stage(
                f"overflow and replay on the {transport} transport",
                lambda: check_replay(self.env, transport, self.options.capture, self.prepare),
            )
            if self.console is None or not values:
                return
            wrong = {rank: value["wrong"] for rank, value in enumerate(values) if value["wrong"]}
            self.result.replays.append({**values[0], "wrong": wrong})
            if wrong:
                hosts = ", ".join(dict.fromkeys(self.result.hosts[rank] for rank in wrong))
                message = f"on the {transport} transport, rank {ranges(wrong)} ({hosts}): {next(iter(wrong.values()))}"
                self.result.findings.append(Finding("replay-failed", message, tuple(wrong)))
                notes.append("[bold red]wrong[/]")
            else:
                graphs = f", {values[0]['captures']} CUDA graphs" if values[0]["captures"] else ""
                notes.append(f"{values[0]['replays']} of {values[0]['steps']} steps replayed{graphs}")

    def _pairs(self, *, peer_memory: bool) -> None:
        with self.progress.stage("links between ranks") as notes:
            seconds = self._share(0.5)
            values, _ = self._stage(
                "links between ranks",
                lambda: measure_pairs(self.env, seconds, self.stages.progress, peer_memory=peer_memory),
            )
            if self.console is None or not values:
                return
            pairs = {}
            for of_rank, _left in values:
                for pair in of_rank:
                    key = (pair.path, pair.a, pair.b)
                    known = pairs.setdefault(key, pair)
                    pairs[key] = replace(known, intact=known.intact and pair.intact)
            self.result.pairs = [pairs[key] for key in sorted(pairs)]
            self.result.classes = classify(self.result.pairs, self.result.hosts)
            self.result.findings += judge_pairs(self.result.pairs, self.result.hosts)
            count = len({key[1:] for key in pairs})
            notes.append(f"{count} pair{'s' if count > 1 else ''}")
            left = values[0][1]
            if left:
                message = (
                    f"{left} of {len(schedule(self.env.world_size))} rounds of pairs were left out for lack of time"
                )
                self.result.findings.append(Finding("cut-short", message))

    def _speed(self, names: list[str]) -> None:
        self.result.shape = shape = standard_shape(self.env)
        graphs = self.env.device.type == "cuda" and self.options.capture != "never"
        self.result.captured = graphs
        wires = [(name, wire) for name in names for wire in ("bf16", "mxfp8")]
        with self.progress.stage("dispatch and combine") as notes:
            seconds = self._share(0.8) / len(wires)
            for name, wire in wires:
                values, _ = self._stage(
                    f"timing {wire} on the {name} transport",
                    lambda name=name, wire=wire: measure_transport(
                        self.env, shape, name, wire, seconds, self.stages.progress, graphs=graphs
                    ),
                )
                if self.console is not None and values:
                    self.result.speeds.append(summarise(name, wire, values))
            if self.console is not None:
                notes.append(f"{len(self.result.speeds)} timings")
                self._compare_transports()

    def _compare_transports(self) -> None:
        total = {(each.transport, each.wire): each.dispatch_us + each.combine_us for each in self.result.speeds}
        for wire in ("bf16", "mxfp8"):
            times = {name: us for (name, of_wire), us in total.items() if of_wire == wire}
            chosen = times.get(self.result.auto)
            best = min(times, key=times.get) if times else ""
            if chosen is not None and chosen > 1.25 * times[best]:
                message = (
                    f"transport='auto' takes {self.result.auto}, but {best} was {chosen / times[best]:.1f} times as "
                    f"fast at this shape with {wire}"
                )
                self.result.findings.append(Finding("not-the-fastest", message))

    # -- inside --------------------------------------------------------------------------------------

    def _stage(self, name: str, work: Callable[[], Any]) -> tuple[list[Any], list[Finding]]:
        values, findings = self.stages.run(name, work)
        self.result.findings += findings
        return values, findings

    def _share(self, share: float) -> float:
        """Part of the time that is left, a little at least."""
        left = self.options.time_limit - (time.perf_counter() - self.started)
        return max(share * left, 1.0)

    def _give_up(self, finding: Finding) -> None:
        """On rank 0, from the watching thread, while the main thread may be blocked for ever."""
        self.progress.stop()
        self.result.findings.append(finding)
        self._report()

    def _report(self) -> None:
        if self.console is None:
            return
        with self._reporting:
            if self._reported:
                return
            self._reported = True
        result = self.result
        result.seconds = time.perf_counter() - self.started
        result.findings += result.judge_cases()
        from .. import __version__

        if self.quiet:
            print_json(self.console, result.to_dict(__version__))
            return
        print_report(self.console, result)
        if self.options.json is not None:
            try:
                text = json.dumps(result.to_dict(__version__), indent=1) + "\n"
                self.options.json.write_text(text, encoding="utf-8")
                self.console.print(f"written to {self.options.json}")
            except OSError as error:
                # The others wait for this rank's verdict, so it must not leave with an exception.
                result.complete = False
                self.console.print(f"[bold red]could not write[/] {self.options.json}: {error}")


def _starter(env: Env) -> str:
    if "EP_COMM_LAUNCHER_PID" in os.environ:
        return "ep-comm itself"
    return "the caller" if env.launcher == "existing" else env.launcher
