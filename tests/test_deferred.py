"""``check="deferred"``: steps launched behind an open verdict, on the CPU: the same code as on GPUs, where the step may
run as a CUDA graph as well (tests/gpu)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ep_comm.runner
from ep_comm import ArgumentError, ConfigError, RoutingError, StepRunner
from ep_comm.deferred import LAG

from .harness import expect_error, run_ranks
from .tiny_model import HIDDEN, Model, assert_same_state, batch, config, state_of, step_fn

STEPS = 14


def runner(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any, **options: Any) -> StepRunner:
    return StepRunner(step, model=model, optimizer=optimizer, check="deferred", capture="never", **options)


@contextlib.contextmanager
def logged_updates() -> Iterator[list[str]]:
    """What the launched steps did, in order."""
    log: list[str] = []

    def step_unless(optimizers: list[torch.optim.Optimizer], skip: Tensor) -> None:
        log.append("skipped" if skip.item() else "updated")
        original(optimizers, skip)

    original, ep_comm.runner.step_unless = ep_comm.runner.step_unless, step_unless
    try:
        yield log
    finally:
        ep_comm.runner.step_unless = original


def lively_step(model: Model) -> Any:
    """The tiny model's step, which also draws from Python's generator, and spoils its batch."""
    inner = step_fn(model)

    def step(micro_batches: Any) -> Tensor:
        scale = 1.0 + random.random()
        loss = torch.tensor(inner([(scale * x, target) for x, target in micro_batches]))
        micro_batches.pop()[0].fill_(torch.nan)
        return loss

    return step


def train(rank: int, mode: str, deferred: bool, lr: Any) -> tuple[dict[str, Tensor], list[float], StepRunner]:
    torch.manual_seed(7 + rank)
    random.seed(7 + rank)
    model = Model(config(mode, **({"budget_rows": 1} if mode == "static" else {})))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr.clone() if isinstance(lr, Tensor) else lr, fused=True)
    step = lively_step(model)
    run = (
        runner(model, optimizer, step, headroom=0.0)
        if deferred
        else StepRunner(step, model=model, optimizer=optimizer, capture="never")
    )
    losses = []
    for number in range(STEPS):
        inputs = batch(rank, number)
        losses.append(run(inputs))
        for x, target in inputs:  # the caller may use his buffers again
            x.fill_(torch.nan)
            target.zero_()
        torch.rand(3)  # and draw random numbers in between
        random.random()
        if isinstance(lr, Tensor):
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (number + 1))
        if number in (3, 7):
            run.flush()
    run.flush()
    return state_of(model, optimizer), [float(loss) for loss in losses], run


def compare(rank: int, world_size: int, tensor_lr: bool) -> tuple[int, list[str]]:
    lr = torch.tensor(1e-2) if tensor_lr else 1e-2
    want, want_losses, _ = train(rank, "eager", False, lr)
    with logged_updates() as log:
        got, losses, run = train(rank, "static", True, lr)
    assert_same_state(got, want)
    assert losses == want_losses
    assert run.steps == STEPS and run.pending == 0
    return run.replays, log


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_deferred_training_equals_eager(tensor_lr: bool) -> None:
    """With dropout, router biases, a schedule, random numbers drawn in between and overwritten batches."""
    (replays, log), (other_replays, other_log) = run_ranks(compare, 2, tensor_lr)
    assert replays == other_replays and log == other_log
    assert replays >= 3 and "updated" in log
    skipped = [index for index, what in enumerate(log) if what == "skipped"]
    assert any(b == a + 1 for a, b in zip(skipped, skipped[1:], strict=False)), log


def interrupted(rank: int, world_size: int) -> Any:
    """A step with a bad id among good ones, seen two steps later."""
    torch.manual_seed(rank)
    model = Model(config("static", capacity_factor=100.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    inner, bad = step_fn(model), torch.zeros(1)
    layer = model.layers[0]
    dispatch = layer.dispatcher.dispatch

    def step(micro_batches: Any) -> float:
        def with_bad_id(x: Tensor, idx: Tensor, weights: Tensor) -> Any:
            poisoned = bool((x == 123.0).any())
            return dispatch(x, torch.full_like(idx, 99) if poisoned else idx, weights)

        layer.dispatcher.dispatch = with_bad_id
        return inner(micro_batches)

    run = runner(model, optimizer, step, extra_state=[bad])
    good = [(torch.ones(3, HIDDEN), torch.ones(3, HIDDEN))]
    for _ in range(4):
        run(good)
    run.flush()
    before = state_of(model, optimizer)
    poison = [(torch.full((3, HIDDEN), 123.0 if rank == 1 else 1.0), torch.ones(3, HIDDEN))]
    errors = [expect_error(run, poison), expect_error(run, good)]
    refused = [expect_error(each.state_dict) for each in (model, model.layers[1], optimizer)]
    refused += [expect_error(each.load_state_dict, {"state": {}, "param_groups": []}) for each in (model, optimizer)]
    refused.append(expect_error(runner(model, optimizer, step), good))
    errors.append(expect_error(run, good))
    assert run.pending == 0, errors
    assert_same_state(state_of(model, optimizer), before)
    run(good)
    run.flush()
    return errors, refused, run.steps


def test_a_failure_is_raised_everywhere_and_undoes_what_was_launched_behind_it() -> None:
    for errors, refused, steps in run_ranks(interrupted, 2):
        assert [error.type for error in errors[:LAG]] == [""] * LAG
        assert errors[LAG].type == RoutingError.__name__ and "99" in errors[LAG].message
        assert "rank 1" in errors[LAG].message and "layers.0" in errors[LAG].message
        assert all("open" in error.message and "flush() " in error.message for error in refused), refused
        assert steps == 5


def late_readers(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    model = Model(config("static", capacity_factor=100.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    run = runner(model, optimizer, step_fn(model))
    seen = []
    for number in range(6):
        run(batch(rank, number))
        seen.append((run.steps, run.pending))
    assert seen == [(1, 0), (2, 0), (2, 1), (2, 2), (3, 2), (4, 2)]
    assert run.state_dict()["steps"] == 6 and run.pending == 0
    run(batch(rank, 7))
    for group in optimizer.param_groups:  # it cannot skip a step: nothing may be open while it steps
        group["fused"] = False
    run(batch(rank, 8))
    assert (run.steps, run.pending) == (8, 0)
    for group in optimizer.param_groups:
        group["fused"] = True
    run(batch(rank, 9))
    run.close()
    assert (run.steps, run.pending) == (9, 0)
    model.state_dict()


def test_when_verdicts_are_read() -> None:
    run_ranks(late_readers, 2)


def test_what_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, fused=True)
    run = runner(model, optimizer, lambda x: model(x).sum().backward())
    for requires_grad in (True, False, False, False, True):
        inputs = torch.ones(1, 2, requires_grad=requires_grad)
        if requires_grad:
            with pytest.raises(ArgumentError, match=r"batch: tensor 0 of it, of shape \[1, 2\], requires a gradient"):
                run(inputs)
        else:
            run(inputs)
    run.flush()
    assert run.steps == 3
    with pytest.raises(
        ArgumentError, match="batch: entry 1 of it is of type object, which check='deferred' cannot keep"
    ):
        run([torch.ones(1, 2), object()])
    with pytest.raises(ConfigError, match="check must be 'every_step' or 'deferred', got 'sometimes'"):
        StepRunner(print, model=model, optimizer=optimizer, check="sometimes")


def raising(rank: int, world_size: int) -> None:
    """A step that raises on every rank, behind one that fits and behind one that overflows: as if it had not been."""
    small = [(torch.ones(1, HIDDEN), torch.ones(1, HIDDEN))]
    large = [(torch.ones(12, HIDDEN), torch.ones(12, HIDDEN))]
    bad = [(torch.full((3, HIDDEN), 55.0), torch.ones(3, HIDDEN))]
    states = []
    for with_bad_steps in (False, True):
        torch.manual_seed(rank)
        model = Model(config("static", budget_rows=256))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        inner = step_fn(model)

        def step(micro_batches: Any, inner: Any = inner) -> None:
            inner(micro_batches)
            if bool((micro_batches[0][0] == 55.0).any()):
                raise ValueError("no good")

        run = runner(model, optimizer, step, headroom=0.0)
        for number in range(7):
            if number == 5:
                for layer in model.layers:
                    layer.dispatcher.budget.rows.rows = 8
            run(large if number == 5 else small)
            if with_bad_steps and number in (3, 5):
                assert run.pending == 2 and run.replays == 0
                assert expect_error(run, bad).message == "no good"
                assert run.pending == 2
        run.flush()
        assert run.steps == 7 and run.replayed_steps == [5]
        states.append(state_of(model, optimizer))
    assert_same_state(*states)


def test_a_step_that_raises_leaves_open_verdicts_alone() -> None:
    run_ranks(raising, 2)


def late_parameters(rank: int, world_size: int) -> tuple[list[int], list[str]]:
    """Momentum that begins in a skipped step; behind open verdicts a group that is added and a learning rate that
    becomes a tensor; a result whose shape follows the routing."""
    states, found = [], []
    for mode in ("eager", "static"):
        torch.manual_seed(3)
        model = Model(config(mode, **({"budget_rows": 256} if mode == "static" else {})))
        model.late, model.added = (nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        groups = [{"params": [*model.layers.parameters()]}, {"params": [*model.late.parameters()]}]
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, fused=True)
        inner, attempts = step_fn(model), []

        def step(
            batches: Any, model: Model = model, inner: Any = inner, attempts: list[int] = attempts
        ) -> tuple[Tensor, Tensor]:
            *batches, number = batches
            if number >= 4:  # from here on `late` has gradients, and `added` before it is stepped
                batches = [(model.added(model.late(x)), target) for x, target in batches]
            inner(batches)
            attempts.append(number)
            return torch.zeros(attempts.count(4) if number == 4 else 1), torch.tensor(number)

        if mode == "static":
            run = runner(model, optimizer, step, headroom=0.0)
        else:
            run = StepRunner(step, model=model, optimizer=optimizer)
        for number in range(8):
            torch.full((10_000,), torch.nan)  # what fresh memory may hold
            if number == 4 and mode == "static":
                for layer in model.layers:
                    layer.dispatcher.budget.rows.rows = 8
            if number == 5:
                optimizer.add_param_group({"params": [*model.added.parameters()]})
                optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
            inputs = (torch.ones(12, HIDDEN), torch.ones(12, HIDDEN))
            caught = expect_error(run, [inputs, number])
            found += [caught.message] if caught.type else []
        run.flush()
        assert run.steps == 8
        states.append(state_of(model, optimizer))
    assert_same_state(*states)
    return run.replayed_steps, found


def test_what_changes_behind_an_open_verdict() -> None:
    for replayed, (message,) in run_ranks(late_parameters, 2):
        assert replayed == [4]
        assert "step 4: tensor 0 of the result has another shape" in message and "the steps are committed" in message
