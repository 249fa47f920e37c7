"""The whole of ``ep-comm tune``: read, fit, choose, forecast, validate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from .assemble import Survey, assemble, survey
from .budgets import BudgetFile, LayerChoice, Rate
from .corpus import sample_from_corpora
from .forecast import Forecast, forecast
from .problems import Problem, ProblemLog
from .readers.files import TraceFiles, find_files
from .readers.record import Reading
from .recommend import CostModel, Recommendation, recommend
from .risk import Columns, RiskModel
from .sample import Sample
from .tail import Interval
from .target import Target
from .validate import HoldOut, hold_out

__all__ = ["TuneRequest", "TuneResult", "tune"]

_FEW_STEPS = 50


@dataclass(frozen=True)
class TuneRequest:
    """What to tune, for which target, under which limits.

    Attributes:
        paths: traces.
        target: sizes of the training.
        costs: what rows and replays cost.
        max_memory: bytes of all buffers of a rank, or None.
        replays_per_1000: most replays in a thousand steps, or None.
        headroom: of StepRunner.
        pairs: tune ``pair_rows`` too (collective transport).
        share: part of the steps that the hold-out check fits.
        keep: kinds of problems whose data is used all the same.
        columns: the trace's names for our fields.
        document_tokens, concentration: of the model for corpus-level counts.
        seed: of jitter, bootstrap and simulations.
    """

    paths: list[Path]
    target: Target
    costs: CostModel = CostModel()
    max_memory: float | None = None
    replays_per_1000: float | None = None
    headroom: float = 0.1
    pairs: bool = True
    share: float = 0.5
    keep: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)
    document_tokens: int = 2048
    concentration: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("headroom", 0.0, 10.0),
            ("share", 0.1, 0.9),
            ("document_tokens", 1, 2**28),
            ("concentration", 1e-3, 1e9),
            ("max_memory", 1, 2**60),
            ("replays_per_1000", 0.0, 1000.0),
            ("seed", 0, 2**32),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"--{name.replace('_', '-')} must be from {low} to {high:g}, got {value}")


@dataclass(frozen=True)
class TuneResult:
    """The answer for one target.

    Attributes:
        request: what was asked.
        files: that were read.
        seen: survey of the trace; None for corpora.
        pairs_read: (token, layer) records read.
        problems: of the trace.
        sample: demand of the target.
        model: the fit.
        recommendation: the choice.
        layer_risks: probability that each layer overflows in a step.
        run: forecast for the run's steps.
        checked: hold-out check, None where the sample is too short or simulated.
        warnings: what the user should not overlook.
    """

    request: TuneRequest
    files: TraceFiles
    seen: Survey | None
    pairs_read: int
    problems: list[Problem]
    sample: Sample
    model: RiskModel
    recommendation: Recommendation
    layer_risks: list[Interval]
    run: Forecast
    checked: HoldOut | None
    warnings: list[str]

    def budget_file(self) -> BudgetFile:
        """What goes into ``budget.json``."""
        sample, budgets = self.sample, self.recommendation.chosen.budgets_J
        layers = len(sample.layers)
        return BudgetFile(
            ep_size=sample.ep_size,
            num_experts=sample.num_experts,
            top_k=sample.top_k,
            alignment=sample.alignment,
            max_tokens_per_rank=self.request.target.tokens_per_rank or sample.tokens_per_rank,
            placement=self.request.target.placement,
            replays_per_1000=_rate(self.recommendation.risk.probability),
            layers=[
                LayerChoice(
                    name, int(budgets[at]), int(budgets[layers + at]) if self.request.pairs else None, _rate(risk)
                )
                for at, (name, risk) in enumerate(zip(sample.layers, self.layer_risks, strict=True))
            ],
        )


def _rate(interval: Interval) -> Rate:
    return Rate(*(float(f"{1000 * value:.4g}") for value in (interval.value, interval.low, interval.high)))


def tune(request: TuneRequest, progress: Callable[[int], None] = lambda _: None) -> TuneResult:
    """Answer one request.

    Args:
        progress: called with bytes read since the last call.

    Raises:
        ConfigError: an option is out of range, or no budget satisfies the limits.
        TuneError: the trace cannot be used.
    """
    target = request.target
    files = find_files(request.paths, request.columns)
    log = ProblemLog(request.keep)
    state = Reading(log, target.num_experts, request.columns, progress=progress)
    corpora = files.corpora(state)
    seen: Survey | None = None
    if corpora is not None:
        sample = sample_from_corpora(corpora, target, request.document_tokens, request.concentration, request.seed)
    else:
        readings: list[Reading] = []

        def reading(to: ProblemLog) -> Reading:
            follow = progress if to is log else (lambda _: None)
            readings.append(Reading(to, target.num_experts, request.columns, progress=follow, top_k=target.top_k))
            return readings[-1]

        seen = survey(files, reading)
        sample = assemble(files, seen, target, reading, log)
        state = readings[-1]
    return _answer(request, files, seen, state, log, sample)


def _answer(
    request: TuneRequest, files: TraceFiles, seen: Survey | None, state: Reading, log: ProblemLog, sample: Sample
) -> TuneResult:
    if sample.num_steps < 2:
        raise ConfigError(f"tuning needs at least 2 complete steps, the trace has {sample.num_steps} for this target")
    pairs = request.pairs and request.target.ep_size > 1
    if pairs != request.pairs:
        request = replace(request, pairs=False)
    limits = {"max_memory": request.max_memory, "replays_per_1000": request.replays_per_1000}
    model = RiskModel(Columns.of(sample, pairs=pairs), request.seed)
    choice = recommend(sample, request.target, model, request.costs, **limits)
    budgets = choice.chosen.budgets_J
    warnings = _warnings(sample, model)
    try:
        checked = hold_out(
            sample,
            request.target,
            request.costs,
            pairs=pairs,
            share=request.share,
            headroom=request.headroom,
            seed=request.seed,
            **limits,
        )
    except ConfigError as error:
        checked = None
        warnings.append(f"no hold-out check: on the first part of the trace {error}")
    return TuneResult(
        request,
        files,
        seen,
        state.pairs,
        log.problems,
        sample,
        model,
        choice,
        _layer_risks(model, budgets, len(sample.layers)),
        forecast(model, choice.risk, budgets, request.target.steps, request.headroom, request.seed, from_start=True),
        checked,
        warnings,
    )


def _layer_risks(model: RiskModel, budgets_J: np.ndarray, layers: int) -> list[Interval]:
    """Probability that rows or pairs of a layer do not fit: the larger of the two, with the bootstrap's interval."""
    risks = []
    for layer in range(layers):
        of_layer = []
        for column in range(layer, len(budgets_J), layers):
            draws = model.tails[column].exceedance(float(budgets_J[column]))
            if budgets_J[column] >= model.columns.limit_J[column]:
                draws = np.zeros_like(draws)
            of_layer.append(draws)
        draws = np.maximum.reduce(of_layer)
        risks.append(Interval.of(float(draws[0]), draws[1:]))
    return risks


def _warnings(sample: Sample, model: RiskModel) -> list[str]:
    warnings, drift = [], model.drift
    if drift.changed:
        what = f"the demand changes over the trace (mean rows {drift.change:+.1%} from its first to its last eighth)"
        if drift.first:
            what += f"; the first {drift.first} steps are unlike the later ones and were left out of the fit"
        if drift.slope_J.any():
            what += "; the trend that remains was carried to the end of the trace"
        warnings.append(what + ". Later training may differ again: tune anew now and then")
    if model.num_steps < _FEW_STEPS:
        warnings.append(f"only {model.num_steps} steps: the intervals are wide")
    if model.correlation > 0.1 * model.num_steps:
        warnings.append(
            f"steps next to each other are alike over about {model.correlation:.0f} steps: the trace says as much as "
            f"{max(1, round(model.num_steps / model.correlation))} independent steps"
        )
    return warnings
