"""Choosing budgets, the growth policy, budget.json, and the two commands as a user runs them."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import ep_comm.tune.optional as optional
from ep_comm import ConfigError, Dispatcher, EPConfig, StepRunner
from ep_comm.cli.main import run as run_cli
from ep_comm.train.options import TrainOptions, parse_budget
from ep_comm.tune import BudgetFile, LayerChoice, TuneError, load_budgets
from ep_comm.tune.budgets import Rate
from ep_comm.tune.contents import print_contents, read_contents
from ep_comm.tune.drift import find_drift
from ep_comm.tune.html import write_html
from ep_comm.tune.policy import replay_steps
from ep_comm.tune.recommend import CostModel, recommend
from ep_comm.tune.report import print_result
from ep_comm.tune.risk import Columns, RiskModel
from ep_comm.tune.run import TuneRequest, TuneResult, tune
from ep_comm.tune.target import Target
from ep_comm.tune.validate import hold_out
from tests.tiny_model import Model, batch, config, step_fn
from tests.train.tiny import TINY_FLAGS, run_program

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
TRAINING = FIXTURES / "training_counts.npz"
"""Counts of ``ep-comm train --steps 600 --ranks 2 --hidden-size 64 --ffn-size 64 --batch-size 4 --layers 3``."""
CORPORA = FIXTURES / "olmoe_expert_counts.json"
"""Counts of whole corpora, from allenai/OLMoE, scripts/routing_output (Apache-2.0)."""

TARGET = Target(2, hidden_size=64, dtype="fp32", top_k=2, steps=1000)
COSTS = CostModel(step_ms=1)


@pytest.fixture(scope="module")
def result() -> TuneResult:
    return tune(TuneRequest([TRAINING], TARGET, COSTS, replays_per_1000=5))


# -- recommendation -----------------------------------------------------------------------------------


def test_limits_are_kept(result: TuneResult) -> None:
    assert result.recommendation.risk.probability.value <= 0.005
    frontier = result.recommendation.frontier
    memory = [point.memory_bytes for point in frontier]
    middle = (min(memory) + max(memory)) / 2
    limited = tune(TuneRequest([TRAINING], TARGET, COSTS, max_memory=middle))
    assert limited.recommendation.chosen.memory_bytes <= middle
    with pytest.raises(ConfigError, match="--max-memory .* the smallest budgets take"):
        tune(TuneRequest([TRAINING], TARGET, COSTS, max_memory=1000))
    with pytest.raises(ConfigError, match="--replays-per-1000 .* the least with --max-memory"):
        tune(TuneRequest([TRAINING], TARGET, COSTS, max_memory=min(memory) + 100_000, replays_per_1000=0.001))


def test_the_choice_is_the_cheapest(result: TuneResult) -> None:
    chosen = result.recommendation.chosen
    allowed = [point for point in result.recommendation.frontier if point.probability <= 0.002]
    assert chosen.cost_ms <= min(point.cost_ms for point in allowed) + 1e-12
    assert all(budget % 16 == 0 for budget in chosen.budgets_J[:3])
    dear = tune(TuneRequest([TRAINING], TARGET, CostModel(step_ms=1e6))).recommendation.chosen
    cheap = tune(TuneRequest([TRAINING], TARGET, CostModel(step_ms=1e-3))).recommendation.chosen
    assert dear.memory_bytes > chosen.memory_bytes > cheap.memory_bytes


def test_alternatives(result: TuneResult) -> None:
    one, usual, worst = result.recommendation.alternatives
    assert len(set(one.point.budgets_J[:3])) == 1
    assert usual.point.budgets_J[0] == 1280
    assert worst.probability == 0 and worst.point.budgets_J[0] == result.sample.worst_case_rows == 2096


def test_start_of_training_is_left_out_and_told(result: TuneResult) -> None:
    assert 30 <= result.model.drift.first <= 150
    assert any("the first" in warning and "left out of the fit" in warning for warning in result.warnings)
    start = result.sample.part(0, result.model.drift.first)
    columns = Columns.of(start, pairs=True)
    done = replay_steps(columns.values_SJ, result.recommendation.chosen.budgets_J, columns.limit_J, columns.unit_J, 0.1)
    assert result.run.start_replays == done.replays > 0


@pytest.mark.parametrize("share", [0.35, 0.5, 0.75])
@pytest.mark.parametrize("limit", [5, 100])
def test_hold_out_of_real_training(result: TuneResult, share: float, limit: float) -> None:
    check = hold_out(
        result.sample, TARGET, COSTS, pairs=False, share=share, headroom=0.1, seed=0, replays_per_1000=limit
    )  # fmt: skip
    assert check.agrees, (check.predicted, check.observed)
    assert check.predicted.replays.high <= 10


def test_drift_is_found_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    noise = 1000 * np.exp(0.05 * rng.standard_normal((800, 6)))
    assert not find_drift(noise).changed
    trend = noise * np.linspace(1, 1.2, 800)[:, None]
    assert find_drift(trend).changed
    recentred = find_drift(trend).recentre(trend)
    assert recentred.mean() == pytest.approx(1200, rel=0.01)
    jump = noise.copy()
    jump[:150] *= 1.3
    assert 150 <= find_drift(jump).first < 400


def test_corpora_are_a_model_and_say_so() -> None:
    target = Target(8, tokens_per_rank=2048, hidden_size=64, top_k=8)
    answer = tune(TuneRequest([CORPORA], target, columns={"model": "olmoe"}, document_tokens=1024))
    assert answer.sample.source == "model" and "a model, not a trace" in answer.sample.notes[0]
    assert answer.checked is None
    alike = tune(TuneRequest([CORPORA], target, columns={"model": "olmoe"}, document_tokens=1024, concentration=1e4))
    assert alike.sample.rows_SL.std() < answer.sample.rows_SL.std()
    with pytest.raises(ConfigError, match="holds the models olmoe, mistral"):
        tune(TuneRequest([CORPORA], target))
    with pytest.raises(ConfigError, match="need --tokens-per-rank and --top-k"):
        tune(TuneRequest([CORPORA], replace(target, tokens_per_rank=None), columns={"model": "olmoe"}))


# -- growth policy ------------------------------------------------------------------------------------


def test_policy_is_the_runners() -> None:
    """The demands of a real run, replayed through the policy, give the run's own replays and budgets."""
    torch.manual_seed(0)
    model = Model(config(mode="static", budget_rows=8, alignment=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    runner = StepRunner(step_fn(model), model=model, optimizer=optimizer, headroom=0.1)
    demands = []
    for step in range(8):
        runner(batch(0, step, 1))
        states = runner.state_dict()["layers"].values()
        dispatchers = list(_dispatchers(model))
        demands.append([max(d.required_rows_per_rank) for d in dispatchers])
    rows = np.array(demands)
    worst = [d.config.worst_case_rows(1) for d in dispatchers]
    done = replay_steps(rows, np.full(rows.shape[1], 8), np.array(worst), np.ones(rows.shape[1], dtype=int), 0.1)
    assert done.replays == runner.replays > 0
    assert done.budgets_J.tolist() == [state["budget_rows"] for state in states]


def _dispatchers(model: torch.nn.Module) -> list[Dispatcher]:
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, Dispatcher)]


def test_train_tune_train(tmp_path: Path) -> None:
    """A traced run, tuned, and run again with the budgets: the replays are those that the trace predicts."""
    flags = ["--ranks", 2, *TINY_FLAGS, "--steps", 30, "--alignment", 4]
    trace, budget = tmp_path / "routing.jsonl", tmp_path / "budget.json"
    first = run_program("train", *flags, "--trace", trace)
    assert first.returncode == 0, first.stderr
    target = Target(2, hidden_size=32, dtype="fp32", alignment=4, steps=30)
    answer = tune(TuneRequest([trace], target, CostModel(step_ms=0.02)))
    answer.budget_file().save(budget)
    second = run_program("train", *flags, "--budget", budget, "--json", tmp_path / "report.json")
    assert second.returncode == 0, second.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    columns = Columns.of(answer.sample, pairs=True)
    promised = replay_steps(
        columns.values_SJ, answer.recommendation.chosen.budgets_J, columns.limit_J, columns.unit_J, 0.1
    )  # fmt: skip
    assert report["replays"] == promised.replays
    assert [layer["start_rows"] for layer in report["layers"]] == [
        layer.budget_rows for layer in load_budgets(budget).layers
    ]


# -- budget.json --------------------------------------------------------------------------------------

FILE = BudgetFile(
    ep_size=1, num_experts=4, top_k=2, alignment=16, max_tokens_per_rank=10, placement="contiguous",
    replays_per_1000=Rate(1.0, 0.5, 2.0),
    layers=[LayerChoice("0", 32, 7, Rate(1.0, 0.5, 2.0)), LayerChoice("1", 48, None, Rate(0.0, 0.0, 0.0))],
)  # fmt: skip
CONFIG = EPConfig(num_experts=4, top_k=2, hidden_size=8, max_tokens_per_rank=10, mode="static", capacity_factor=2.0)


def test_budget_file_loads_into_config_and_runner(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    FILE.save(path)
    loaded = load_budgets(path)
    assert loaded == FILE
    first, second = (Dispatcher(loaded.apply(CONFIG, layer, 1)) for layer in (0, 1))
    assert (first.budget_rows, first.pair_rows, second.budget_rows) == (32, 7, 48)

    model = torch.nn.Module()
    model.a, model.b = torch.nn.Module(), torch.nn.Module()
    model.a.dispatcher, model.b.dispatcher = Dispatcher(CONFIG), Dispatcher(CONFIG)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    runner = StepRunner(lambda _: None, model=model, optimizer=optimizer)
    runner.load_state_dict(loaded.runner_state(["a", "b"]))
    assert (model.a.dispatcher.budget_rows, model.b.dispatcher.budget_rows) == (32, 48)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "for num_experts=4, the configuration has num_experts=8"),
        ({"max_tokens_per_rank": 20}, "for max_tokens_per_rank=10"),
    ],
)
def test_budgets_for_other_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FILE.apply(replace(CONFIG, **changes), 0)


def test_budgets_for_other_layers_or_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 MoE layers, there is none for layer 2"):
        FILE.apply(CONFIG, 2)
    with pytest.raises(ConfigError, match="ep_size=1, there are 2 ranks"):
        FILE.apply(CONFIG, 0, 2)
    with pytest.raises(ConfigError, match="names has 1"):
        FILE.runner_state(["a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "x"}, "not a budget.json"),
        ({"version": 2}, "version must be 1, got 2"),
        ({"top_k": "2"}, "top_k must be an integer"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [{"budget_rows": -1}]}, "budget_rows must be an integer"),
        ({"replays_per_1000": {"value": 1}}, "value, low and high"),
    ],
)
def test_broken_budget_files(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "budget.json"
    FILE.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        load_budgets(path)


# -- reports and commands -----------------------------------------------------------------------------


def test_report_is_self_contained(result: TuneResult, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_html(path, [result])
    text = path.read_text()
    assert text.count("data:image/png;base64,") == 4
    assert not re.search(r"(src|href)=['\"]http", text)
    assert "hold-out: fitted on the first 300 steps" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_cut(result: TuneResult, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_result(console, result)
    print_contents(console, read_contents([TRAINING], None, None, (), {}))
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= max(width, 66)
    assert "busiest" in text and "capacity_factor=1.25" in text
    budgets = [f"{int(rows):,}" for rows in result.recommendation.chosen.budgets_J[: len(result.sample.layers)]]
    assert all(rows in text for rows in budgets)


def test_terminal_report_names_everything(result: TuneResult) -> None:
    console = Console(width=160, record=True, highlight=False)
    with console.capture() as captured:
        print_result(console, result)
    text = captured.get()
    for part in (
        "recommended budgets",
        "pair rows",
        "one factor for all layers",
        "worst case",
        "95 % interval",
        "assuming a replay costs 1 ms",
    ):
        assert part in text


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ep-size", "2", "--top-k", "2", "--hidden", "64", "--dtype", "fp32", "--replays-per-1000", "5"]
    assert run_cli(["tune", str(TRAINING), *options, "--budget", str(tmp_path / "b.json"), "--json", "-"]) == 0
    out = capsys.readouterr().out
    (facts,) = json.loads(out)
    assert facts["budgets"]["layers"][0]["budget_rows"] == load_budgets(tmp_path / "b.json").layers[0].budget_rows
    assert facts["hold_out"]["agrees"] is True
    assert (
        run_cli(["tune", str(TRAINING), "--ep-size", "1", "--ep-size", "2", "--top-k", "2", "--transport", "symmetric"])
        == 0
    )
    assert run_cli(["trace", str(TRAINING), "--json", str(tmp_path / "t.json")]) == 0
    contents = json.loads((tmp_path / "t.json").read_text())
    assert contents["steps"] == 600 and contents["ranks"] == [0, 1] and len(contents["expert_load"]["2"]) == 8
    assert sum(contents["expert_load"]["0"]) == 600 * 2 * 512 * 2
    assert run_cli(["trace", str(CORPORA), "--column", "model=mistral"]) == 0
    capsys.readouterr()
    for content, reason in (("", "nothing is in there"), ("no record\n" * 3, "not a JSON record")):
        (tmp_path / "bad.jsonl").write_text(content)
        assert run_cli(["trace", str(tmp_path / "bad.jsonl")]) == 1
        output = capsys.readouterr()
        assert output.out == "" and len(output.err.splitlines()) == 1
        assert "no valid record in" in output.err and reason in output.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ep-size", "0"], "--ep-size must be from 1"),
        (["--ep-size", "3"], "ep_size must divide the number of experts"),
        (["--ep-size", "2", "--dtype", "fp8"], "--dtype must be one of"),
        (["--ep-size", "2", "--hidden", "0"], "--hidden must be from 1"),
        (["--ep-size", "2", "--keep", "nothing"], "keep must be one of"),
        (["--ep-size", "2", "--column", "step"], "--column must be OURS=THEIRS"),
        (["--ep-size", "2", "--placement", "/nowhere.json"], "placement must be contiguous"),
        (["--ep-size", "2", "--transport", "pigeon"], "--transport must be"),
        (["--ep-size", "2", "--step-ms", "0"], "--step-ms must be above 0"),
        (["--ep-size", "2", "--fit-share", "2"], "must be from 0.1"),
        (["--ep-size", "1", "--ep-size", "2", "--budget", "x.json"], "one --ep-size"),
        (["--ep-size", "2", "--budget", "/nowhere/b.json"], "b.json: the folder /nowhere does not exist"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["tune", str(TRAINING), "--top-k", "2", *options]) in (1, 2)
    error = capsys.readouterr().err
    assert re.search(message, error) and "Traceback" not in error


def test_missing_extra_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "scipy", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    for function in (optional.scipy_stats, optional.pyplot):
        with pytest.raises(ConfigError, match=r"pip install -e '\.\[tune\]'"):
            function()


def test_too_few_steps(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps([[[5, 3]]]))
    with pytest.raises(ConfigError, match="at least 2 complete steps"):
        tune(TuneRequest([path], Target(2, top_k=1)))
    path.write_text(json.dumps([[[5, 3]], [[4, 4]], [[4, 4]]]))
    answer = tune(TuneRequest([path], Target(2, top_k=1)))
    assert "only 3 steps" in " ".join(answer.warnings)


def test_recommendation_needs_no_pairs(result: TuneResult) -> None:
    model = RiskModel(Columns.of(result.sample, pairs=False))
    choice = recommend(result.sample, TARGET, model, COSTS)
    assert choice.chosen.budgets_J.size == 3


def test_trace_error_is_documented() -> None:
    with pytest.raises(TuneError, match="no routing trace"):
        tune(TuneRequest([Path("/nowhere/x.jsonl")], TARGET))


def test_train_refuses_what_is_no_budget(tmp_path: Path) -> None:
    assert parse_budget(None) is None
    assert parse_budget("48") == 48
    with pytest.raises(ConfigError, match="--budget must be a number of rows or a budget.json"):
        parse_budget("many")
    path = tmp_path / "budget.json"
    FILE.save(path)
    with pytest.raises(ConfigError, match="--budget: the budgets are for num_experts=4"):
        TrainOptions(budget=parse_budget(str(path)))
    with pytest.raises(ConfigError, match="not both"):
        TrainOptions(budget=parse_budget(str(path)), capacity_factor=1.0)
