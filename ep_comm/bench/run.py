"""The whole of ``ep-comm bench`` on one rank: who can run, then every shape, contender, format, mode and direction."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..distributed import Env
from ..errors import ConfigError
from .contenders import Contender, Place, Plan, Session, make_contenders
from .link import copy_from_peer, send_to_peer
from .options import BenchOptions, Shape
from .progress import BenchProgress
from .referee import Referee
from .report import LinkSpeed, NotRun, Report, Result
from .timing import GraphCall, Timer, count_host_syncs, median_of_slowest
from .work import Work, make_work

__all__ = ["Bench", "bench"]

_GLOO_SECONDS = 60.0
_COPIES = ("dispatch", "combine_backward")


@dataclass
class _Entrant:
    """A contender that takes part, and its own process group."""

    contender: Contender
    group: dist.ProcessGroup | None
    broken: str | None = None

    def abort(self) -> None:
        """End whatever this rank waits for in the contender's communication."""
        _abort(self.group)


@dataclass(frozen=True)
class _Measured:
    times: list[float]
    host_syncs: int | None
    wrong: str | None
    wire_bytes: int


@dataclass
class Bench:
    """A benchmark in progress on this rank. Collective throughout.

    Attributes:
        options: what to measure.
        env: where.
        contenders: who; None takes those that the options name.
        report: results so far, the same on all ranks.
    """

    options: BenchOptions
    env: Env
    contenders: list[Contender] | None = None
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        options, env = self.options, self.env
        options.check_world_size(env.world_size)
        if env.device.type != "cuda" and "graph" in options.mode:
            raise ConfigError("--mode graph needs GPUs: a CUDA graph is captured")
        if self.contenders is None:
            self.contenders = _named(make_contenders(options), options.contenders)
        self.referee = _make_referee(options, env)
        self.timer = Timer(env.device, options.iterations, options.warmup)
        self.report = Report.begin(options, env)
        # One stream for everything: autograd runs a backward pass on the stream of its forward pass, and a capture
        # must not meet another one.
        self._stream = torch.cuda.Stream(env.device) if env.device.type == "cuda" else None
        self._entrants: list[_Entrant] = []
        self._inputs_group: dist.ProcessGroup | None = None

    def run(self, progress: BenchProgress, show: Callable[[Report, Shape], None]) -> Report:
        """Measure everything; ``show`` is called on all ranks when a shape is done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with self._on_stream():
            self.enter()
            self.measure_link()
            progress.start(sum(1 for shape in self.options.shapes() for _ in self._plans(shape)))
            for shape in self.options.shapes():
                self._measure_shape(shape, progress)
                show(self.report, shape)
            self.leave()
        return self.report

    def enter(self) -> None:
        """Find out who can run here, on all ranks, and set them up."""
        for contender in self.contenders:
            place = Place(self.env.rank, self.env.world_size, self.env.device, None, self.options)
            asked = self.referee.attempt(lambda c=contender, p=place: c.problem(p), facts=lambda text: text)
            reasons = [text for text in asked.facts if text] or ([asked.problem] if asked.problem else [])
            if reasons:
                self.report.not_run.append(NotRun(contender.name, reasons[0]))
                continue
            entrant = _Entrant(contender, self._new_group())
            place = Place(self.env.rank, self.env.world_size, self.env.device, entrant.group, self.options)
            started = self.referee.attempt(lambda c=contender, p=place: c.start(p), abort=entrant.abort)
            if started.problem:
                self.report.not_run.append(NotRun(contender.name, started.problem))
                continue
            self._entrants.append(entrant)
            self.report.contenders[contender.name] = contender.origin

    def leave(self) -> None:
        """Give back what the contenders hold."""
        for entrant in self._entrants:
            if entrant.broken is None:
                self.referee.attempt(entrant.contender.stop, abort=entrant.abort)
        self._entrants.clear()

    def measure_link(self) -> None:
        """The fastest plain copy between neighbours that works here."""
        if self.env.world_size == 1:
            return
        kinds = [send_to_peer]
        if self.env.device.type == "cuda" and self.env.local_world_size == self.env.world_size:
            kinds.insert(0, copy_from_peer)
        for kind in kinds:
            group = self._new_group()
            tried = self.referee.attempt(
                lambda k=kind, g=group: k(self.timer, g, self.env.rank, self.env.world_size),
                facts=lambda link: (link.how, link.size, link.times),
                abort=lambda g=group: _abort(g),
            )
            if tried.problem is None:
                how, size, _ = tried.facts[0]
                microseconds = median_of_slowest([times for _, _, times in tried.facts])
                self.report.link = LinkSpeed(how, size / microseconds / 1e3)
                return
            self.report.notes.append(f"link not measured with {kind.__name__}: {tried.problem}")

    def _measure_shape(self, shape: Shape, progress: BenchProgress) -> None:
        env, options = self.env, self.options
        if self._inputs_group is None:
            self._inputs_group = self._new_group()
        group = self._inputs_group

        def inputs() -> Work:
            work = make_work(shape, env.rank, env.world_size, env.device, group, options.seed, options.skew)
            work.exchange(options.directions)
            return work

        made = self.referee.attempt(inputs, abort=lambda: _abort(group))
        if made.problem:
            self._inputs_group = None
            self.report.notes.append(f"{shape}: no inputs: {made.problem}")
            progress.advance(sum(1 for _ in self._plans(shape)))
            return
        work: Work = made.value
        self.report.imbalance[str(shape)] = sum(i.routing.imbalance() for i in work.items) / len(work.items)
        for entrant, plan, directions in self._plans(shape):
            progress(f"{shape}: {entrant.contender.name} {plan.dtype} {plan.mode}")
            self._measure_plan(entrant, plan, directions, work)
            progress.advance()

    def _plans(self, shape: Shape) -> Iterator[tuple[_Entrant, Plan, list[str]]]:
        """Every session of a shape, with the directions that it measures."""
        for entrant in self._entrants:
            contender, options = entrant.contender, self.options
            dtypes = [each for each in options.dtype if each in contender.dtypes] or list(contender.dtypes[:1])
            modes = [each for each in options.mode if each in contender.modes] or list(contender.modes[:1])
            asked = [each for each in options.directions if each in contender.directions]
            sums = [each for each in asked if each not in _COPIES]
            sessions = {dtype: [each for each in asked if each in _COPIES] for dtype in dtypes}
            if sums and "bf16" in contender.dtypes:
                sessions["bf16"] = sessions.get("bf16", []) + sums  # sums travel in bf16 whatever the rows do
            if "mxfp8-kept" in sessions:
                sessions["mxfp8-kept"] = [each for each in sessions["mxfp8-kept"] if each == "dispatch"]
            for mode in modes:
                for num_sms in options.num_sms if contender.sms else (None,):
                    for dtype, directions in sessions.items():
                        if directions:
                            yield entrant, Plan(shape, dtype, mode, num_sms), directions

    def _measure_plan(self, entrant: _Entrant, plan: Plan, directions: list[str], work: Work) -> None:
        def failed(direction: str, problem: str) -> None:
            self.report.add(self._result(entrant, plan, direction, problem=problem))

        if entrant.broken:
            return

        def open_session() -> Session:
            session = entrant.contender.open(plan)
            session.prepare(work.items)
            return session

        opened = self.referee.attempt(open_session, abort=entrant.abort)
        self._note_failure(entrant, opened)
        if opened.problem:
            for direction in directions:
                failed(direction, opened.problem)
            return
        session: Session = opened.value
        for direction in directions:
            tried = self.referee.attempt(
                lambda d=direction: self._measure(entrant, session, plan, d, work), facts=vars, abort=entrant.abort
            )
            self._note_failure(entrant, tried)
            if tried.problem:
                failed(direction, tried.problem)
            else:
                self.report.add(self._result(entrant, plan, direction, [_Measured(**each) for each in tried.facts]))
            if entrant.broken:
                return
        self._note_failure(entrant, self.referee.attempt(session.close, abort=entrant.abort))

    def _measure(self, entrant: _Entrant, session: Session, plan: Plan, direction: str, work: Work) -> _Measured:
        group, device = entrant.group, self.env.device
        calls = [session.operation(direction, item) for item in work.items]
        with self._captured(calls, session) if plan.mode == "graph" else nullcontext(calls) as timed:

            def check() -> str | None:
                found = (
                    self._check(number, direction, plan, session, entrant.contender.exact, call(), work)
                    for number, call in enumerate(timed)
                )
                return next((text for text in list(found) if text), None)

            before = check()
            host_syncs = count_host_syncs(timed[0], device)
            times = self.timer(timed, group)
            after = check()  # also where the first check failed: the other ranks run the calls as well
        session.raise_errors()
        wire = [session.wire_bytes(direction, item.routing) for item in work.items]
        return _Measured(times, host_syncs, before or after, sum(wire) // len(wire))

    def _check(
        self, number: int, direction: str, plan: Plan, session: Session, exact: bool, got: Any, work: Work
    ) -> str | None:
        if direction in _COPIES:
            return work.check_rows(number, direction, plan.dtype, *got, session.alignment, session.least_segment)
        return work.check_sums(number, *got, exact)

    @contextmanager
    def _captured(self, calls: list[Callable[[], Any]], session: Session) -> Iterator[list[GraphCall]]:
        """The calls as CUDA graphs. They run uncaptured first, so that nothing is initialised under capture."""
        for call in calls:
            call()
            call()
        session.prepare_capture()
        torch.cuda.synchronize(self.env.device)
        graphs: list[GraphCall] = []
        pool = torch.cuda.graph_pool_handle()
        try:
            for call in calls:
                graphs.append(GraphCall(call, self._stream, pool))
            yield graphs
        finally:
            torch.cuda.synchronize(self.env.device)
            for graph in graphs:
                graph.reset()

    def _result(
        self,
        entrant: _Entrant,
        plan: Plan,
        direction: str,
        measured: list[_Measured] | None = None,
        problem: str | None = None,
    ) -> Result:
        contender = entrant.contender
        result = Result(
            shape=plan.shape,
            direction=direction,
            contender=contender.name,
            dtype=plan.dtype,
            mode=plan.mode,
            sms=contender.multiprocessors(plan),
            problem=problem,
        )
        if measured is None:
            return result
        slowest = [max(each) for each in zip(*(rank.times for rank in measured), strict=True)]
        wrong = [f"rank {rank}: {each.wrong}" for rank, each in enumerate(measured) if each.wrong]
        result.microseconds = median_of_slowest([rank.times for rank in measured])
        result.fastest, result.slowest = min(slowest), max(slowest)
        result.wire_bytes = measured[0].wire_bytes
        syncs = [each.host_syncs for each in measured if each.host_syncs is not None]
        result.host_syncs = max(syncs) if syncs else None
        result.wrong = "; ".join(wrong) or None
        result.check = "bitwise" if contender.exact or direction in _COPIES else "rounded"
        return result

    def _note_failure(self, entrant: _Entrant, outcome: Any) -> None:
        """After a failure of some ranks the contender's communication is in no state to be used again."""
        if outcome.problem and not outcome.everywhere:
            entrant.broken = outcome.problem
            self.report.not_run.append(NotRun(entrant.contender.name, f"not run any more: {outcome.problem}"))

    def _new_group(self) -> dist.ProcessGroup | None:
        if self.env.world_size == 1:
            return None
        # NCCL ends the whole process when a collective takes longer than this, so the referee comes first. With
        # gloo it is the other way round: it ends a wait for a rank that failed, which abort() does not.
        seconds = 4 * self.options.timeout if "nccl" in self.env.backend else min(self.options.timeout, _GLOO_SECONDS)
        return dist.new_group(timeout=timedelta(seconds=seconds))

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def bench(
    options: BenchOptions,
    env: Env,
    progress: BenchProgress,
    show: Callable[[Report, Shape], None] = lambda report, shape: None,
    contenders: list[Contender] | None = None,
) -> Report:
    """Run ``options`` on this rank. Collective; returns the same report on all ranks.

    Args:
        progress: shown on rank 0.
        show: called with the report whenever a shape is done.
        contenders: instead of those that the options name.

    Raises:
        ConfigError: the options do not suit the ranks.
    """
    return Bench(options, env, contenders).run(progress, show)


def _make_referee(options: BenchOptions, env: Env) -> Referee:
    if env.world_size == 1:
        return Referee(0, 1, None, options.timeout)
    # What an earlier benchmark of these processes left in the store must not be read again.
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0, group=env.group)
    store = dist.distributed_c10d._get_default_store()
    return Referee(env.rank, env.world_size, store, options.timeout, name[0])


def _abort(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        group.abort()


def _named(contenders: list[Contender], names: tuple[str, ...]) -> list[Contender]:
    """The contenders whose name contains one of ``names``; all where there are none."""
    if not names:
        return contenders
    for name in names:
        if not any(name in contender.name for contender in contenders):
            known = ", ".join(contender.name for contender in contenders)
            raise ConfigError(f"--contenders must be parts of the names {known}, got {name!r}")
    return [contender for contender in contenders if any(name in contender.name for name in names)]
