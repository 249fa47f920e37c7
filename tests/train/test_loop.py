"""Training on two ranks: gradients, replay, trace, resume, verification."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_comm.errors import BudgetExceededError, ConfigError
from ep_comm.trace import read_router_trace
from ep_comm.train.checkpoint import CheckpointError, load_checkpoint
from ep_comm.train.gradients import GradientReducer, is_expert
from ep_comm.train.loop import Trainer
from ep_comm.train.options import TrainOptions
from ep_comm.train.verify import VerificationError, compare_runs
from tests.harness import expect_error, run_ranks
from tests.train.tiny import TINY, make_trainer


def trained(until: int, mode: str | None = None, **options: Any) -> Trainer:
    """Made and trained in one go: a new trainer seeds the generator that dropout draws from."""
    run = make_trainer(mode, **options)
    run.train(until)
    return run


EXACT = {"dropout": 0.0, "dispatch_dtype": "bf16", "grad_dtype": "bf16"}


def full_gradients(rank: int, world_size: int, batch_size: int, max_norm: float) -> dict[str, torch.Tensor]:
    """Gradients of the whole model, experts joined in the order of their global ids."""
    run = make_trainer("eager", batch_size=batch_size, **EXACT)
    loss = run.model.loss(*run.corpus.batch(0, rank, world_size, batch_size))
    loss.backward()
    mean_loss, norm = GradientReducer(run.model, dist.group.WORLD, max_norm).reduce(loss)
    result = {"loss": mean_loss, "norm": norm}
    for name, parameter in run.model.named_parameters():
        parts = [parameter.grad]
        if is_expert(parameter):
            parts = [torch.empty_like(parameter.grad) for _ in range(world_size)]
            dist.all_gather(parts, parameter.grad)
        result[name] = torch.cat(parts)
    run.close()
    return result


@pytest.mark.parametrize("max_norm", [1e9, 0.01])
def test_two_ranks_have_the_gradients_of_one_rank_with_both_batches(max_norm: float) -> None:
    one = run_ranks(full_gradients, 1, 4, max_norm)[0]
    two, other = run_ranks(full_gradients, 2, 2, max_norm)
    assert one.keys() == two.keys()
    assert max_norm == 1e9 or float(one["norm"]) > max_norm, "the clipping case must clip"
    for name, expected in one.items():
        assert torch.allclose(two[name], expected, rtol=2e-4, atol=2e-7), name
        assert torch.equal(two[name], other[name]), name


def static_and_eager(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    static = trained(6, "static", **options)
    eager = trained(6, "eager", **options)
    same = compare_runs(static, eager)
    result = {
        "replays": static.runner.replays,
        "losses": (static.history.losses, eager.history.losses),
        "same": same,
    }
    result["replayed"] = static.history.replayed
    result["over"] = [
        step
        for step, (budgets, rows) in enumerate(zip(static.history.budgets, static.history.required, strict=True))
        if any(need > limit for need, limit in zip(rows, budgets, strict=True))
    ]
    result["validation"] = (static.validate(), eager.validate())
    return result


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_static_from_one_row_ends_with_the_weights_of_eager_mode(dtype: str) -> None:
    options = {
        "budget": 1,
        "alignment": 1,
        "headroom": 0.0,
        "dtype": dtype,
        "shared_ffn": 32,
        "aux_loss": 0.01,
    }
    results = run_ranks(static_and_eager, 2, options)
    for result in results:
        assert result["replays"] >= 1
        assert result["losses"][0] == result["losses"][1]
        assert result["replayed"] == result["over"]
        assert result["validation"][0] == result["validation"][1]
        assert result["same"].values > 10_000 and result["same"].state_values > result["same"].values


def untrained_validation(rank: int, world_size: int) -> tuple[float | None, ...]:
    runs = [make_trainer("static", budget=1), make_trainer("eager"), make_trainer("static", budget=1, max_budget=16)]
    return tuple(run.validate() for run in runs)


def test_validation_grows_budgets_rather_than_lose_tokens() -> None:
    for grown, exact, refused in run_ranks(untrained_validation, 2):
        assert grown == exact is not None and refused is None


def different_runs(rank: int, world_size: int) -> Any:
    first, second = trained(2), trained(2)
    if rank == 1:
        expert = next(parameter for parameter in second.model.parameters() if is_expert(parameter))
        with torch.no_grad():
            expert.view(-1)[5] += 1e-3
    return expect_error(compare_runs, first, second)


def test_comparison_sees_one_changed_value_on_one_rank() -> None:
    for error in run_ranks(different_runs, 2):
        assert error.type == VerificationError.__name__
        assert "experts" in error.message and "on rank 1" in error.message and "1 of " in error.message


def interrupted(rank: int, world_size: int, folder: str) -> tuple[Any, list[float], list[float], list[int]]:
    options = {"budget": 1, "bias_rate": 0.01, "dropout": 0.2}
    straight, first = trained(6, **options), trained(3, **options)
    first.save(Path(folder))
    torch.manual_seed(99)  # what a new process would have instead of the saved generator
    second = make_trainer(**options)
    second.resume(Path(folder))
    budgets = [layer.dispatcher.budget_rows for layer in second.layers]
    second.train(6)
    same = compare_runs(straight, second)
    assert vars(straight.history) == vars(second.history)
    assert straight.runner.budgets() == second.runner.budgets()
    return same, straight.history.losses, second.history.losses, budgets


def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    for same, straight, resumed, budgets in run_ranks(interrupted, 2, str(tmp_path)):
        assert same.values > 10_000 and straight == resumed
        assert min(budgets) > 16, "the budgets must come back grown"
    assert (tmp_path / "latest").read_text() == "step_000003\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000003"]


def resume_errors(rank: int, world_size: int, folder: str) -> list[Any]:
    run = make_trainer()
    run.train(1)
    run.save(Path(folder))
    identity, text = run.options.identity(), run.corpus.fingerprint
    damaged = Path(folder) / "damaged"
    damaged.mkdir(exist_ok=True)
    for other in range(world_size):
        (damaged / f"rank_{other}.pt").write_bytes(b"not a checkpoint")
    (Path(folder) / "empty").mkdir(exist_ok=True)
    return [
        expect_error(load_checkpoint, Path(folder), rank, world_size, {**identity, "layers": 7}, text),
        expect_error(load_checkpoint, Path(folder), rank, 4, identity, text),
        expect_error(load_checkpoint, Path(folder), rank, world_size, identity, "other text"),
        expect_error(load_checkpoint, damaged, rank, world_size, identity, text),
        expect_error(load_checkpoint, Path(folder) / "empty", rank, world_size, identity, text),
    ]


def test_resume_says_what_does_not_fit(tmp_path: Path) -> None:
    expected = [
        (ConfigError, "layers 2 there, 7 here"),
        (ConfigError, "saved with 2 ranks, but this run has 4"),
        (ConfigError, "text differs"),
        (CheckpointError, "cannot be read"),
        (CheckpointError, "no checkpoint in"),
    ]
    for errors in run_ranks(resume_errors, 2, str(tmp_path)):
        assert [error.type for error in errors] == [kind.__name__ for kind, _ in expected]
        for error, (_, message) in zip(errors, expected, strict=True):
            assert message in error.message


def traced(rank: int, world_size: int, path: str, mode: str) -> int:
    run = make_trainer(mode, budget=1 if mode == "static" else None)
    run.attach_trace(Path(path))
    run.train(4)
    run.validate()
    run.close()
    return run.runner.replays


def test_trace_holds_every_committed_step_once(tmp_path: Path) -> None:
    replays = run_ranks(traced, 2, str(tmp_path / "static.jsonl"), "static")
    run_ranks(traced, 2, str(tmp_path / "eager.jsonl"), "eager")
    static = list(read_router_trace(tmp_path / "static.jsonl"))
    assert min(replays) >= 1
    assert static == list(read_router_trace(tmp_path / "eager.jsonl"))
    keys = [(record.rank, record.step, record.layer) for record in static]
    assert keys == [(rank, step, layer) for rank in range(2) for step in range(4) for layer in range(2)]
    assert all(record.num_tokens == 32 and record.topk == 2 for record in static)
    assert {expert for record in static for slots in record.top_indices for expert in slots} <= set(range(4))


def over_the_ceiling(rank: int, world_size: int) -> tuple[Any, bool]:
    run = make_trainer(budget=16, max_budget=32, alignment=16)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    error = expect_error(run.train, 2)
    same = all(torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items())
    return error, same and not run.optimizer.state


def test_ceiling_is_an_error_that_leaves_the_model_alone() -> None:
    for error, untouched in run_ranks(over_the_ceiling, 2):
        assert error.type == BudgetExceededError.__name__ and "layers.0.ffn" in error.message
        assert untouched


def wire_and_time(
    rank: int, world_size: int, dispatch_dtype: str
) -> tuple[list[dict[str, Any]], dict[str, float], float]:
    run = make_trainer(dispatch_dtype=dispatch_dtype, grad_dtype=dispatch_dtype)
    run.train(3)
    return run.wire_facts(), run.clock.totals, run.seconds


def test_wire_facts_without_mxfp8_are_what_a_run_without_it_sends() -> None:
    (mx, clock, seconds), _ = run_ranks(wire_and_time, 2, "mxfp8")
    (plain, _, _), _ = run_ranks(wire_and_time, 2, "bf16")
    for quantised, whole in zip(mx, plain, strict=True):
        assert quantised["row_bytes_plain"] == whole["row_bytes"] == whole["row_bytes_plain"]
        smaller = quantised["direction"] in ("dispatch_forward", "combine_backward")
        assert (quantised["row_bytes"] < whole["row_bytes"]) == smaller
        assert quantised["bytes"] == quantised["row_bytes"] * quantised["tokens"] > 0
    assert all(value >= 0 for value in clock.values()) and clock["exchange"] > 0 and clock["discarded"] > 0
    assert 0.8 * seconds < sum(clock.values()) <= seconds


def test_learning_rate_warms_up_and_decays() -> None:
    options = TrainOptions(**{**TINY, "steps": 20, "warmup": 4, "learning_rate": 1.0})
    rates = [options.learning_rate_at(step) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a > b for a, b in itertools.pairwise(rates[4:])) and rates[-1] == pytest.approx(0.1)


def learned(rank: int, world_size: int) -> list[float]:
    run = make_trainer(steps=40, batch_size=4, learning_rate=1e-2)
    run.train(40)
    json.dumps(vars(run.history))  # plain values only
    return run.history.losses


def test_loss_falls() -> None:
    losses = run_ranks(learned, 2)[0]
    assert losses[0] > 5.4 and sum(losses[-5:]) / 5 < 3.0
