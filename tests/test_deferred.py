"""``check="deferred"``: steps launched behind an open verdict, on the CPU.

CUDA graphs stand aside here: :class:`EagerGraphs` launches a step by running it, with the latch that a captured
step has, and hands out its verdict when asked. The same tests with real graphs are in tests/gpu.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ep_comm import ConfigError, RoutingError, StepRunner
from ep_comm.deferred import LAG
from ep_comm.ledger import StepLedger

from .harness import expect_error, run_ranks
from .tiny_model import HIDDEN, Model, assert_same_state, batch, config, state_of, step_fn

STEPS = 14


@dataclass
class Launched:
    result: Any
    batch: Any
    ledger: StepLedger
    words: list[int]

    def verdict(self) -> Any:
        return self.ledger.parse(self.words)


@dataclass
class Captured:
    updates: bool


class EagerGraphs:
    """Stands in for GraphCache: from the third committed step on, every step is "captured"."""

    captures = replays = 0

    def __init__(self, step: Any, optimizers: list[torch.optim.Optimizer]) -> None:
        self.step, self.optimizers = step, optimizers
        self.committed = 0
        self.latch = False
        self.log: list[str] = []
        self.updates = True

    def find(self, batch: Any, ledger: StepLedger | None, group: Any) -> Captured | None:
        return Captured(self.updates) if self.committed >= 2 else None

    def note_committed(self, batch: Any) -> None:
        self.committed += 1

    def open_latch(self) -> None:
        self.latch = False

    def clear(self) -> None:
        pass

    def launch(self, captured: Captured, batch: Any, *, keep_batch: bool = False) -> Launched:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        ledger = StepLedger(exact=False)
        with ledger.open():
            result = torch.tensor(self.step(batch))
        words = ledger.device_words().tolist()
        self.latch |= words[0] + words[1] > 0
        if captured.updates and not self.latch:
            for optimizer in self.optimizers:
                optimizer.step()
        self.log.append("skipped" if self.latch else "updated")
        kept = [(x.clone(), target.clone()) for x, target in batch]
        return Launched(result, kept if keep_batch else batch, ledger, words)


def runner(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any, **options: Any) -> StepRunner:
    run = StepRunner(step, model=model, optimizer=optimizer, check="deferred", **options)
    run._graphs = EagerGraphs(step, run._optimizers)
    run._step_stream = contextlib.nullcontext
    return run


def lively_step(model: Model) -> Any:
    """The tiny model's step, which also draws from Python's generator."""
    inner = step_fn(model)

    def step(micro_batches: Any) -> float:
        scale = 1.0 + random.random()
        return inner([(scale * x, target) for x, target in micro_batches])

    return step


def train(rank: int, mode: str, deferred: bool, lr: Any) -> tuple[dict[str, Tensor], list[float], StepRunner]:
    torch.manual_seed(7 + rank)
    random.seed(7 + rank)
    model = Model(config(mode, **({"budget_rows": 1} if mode == "static" else {})))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr.clone() if isinstance(lr, Tensor) else lr)
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
    got, losses, run = train(rank, "static", True, lr)
    assert_same_state(got, want)
    assert losses == [float(torch.tensor(loss)) for loss in want_losses]
    assert run.steps == STEPS and run.pending == 0
    return run.replays, run._graphs.log


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
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
        assert all("flush() of the StepRunner on every rank" in error.message for error in refused)
        assert steps == 5


def late_readers(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    model = Model(config("static", capacity_factor=100.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = runner(model, optimizer, step_fn(model))
    seen = []
    for number in range(6):
        run(batch(rank, number))
        seen.append((run.steps, run.pending))
    assert seen == [(1, 0), (2, 0), (2, 1), (2, 2), (3, 2), (4, 2)]
    assert run.state_dict()["steps"] == 6 and run.pending == 0
    run(batch(rank, 7))
    run._graphs.updates = False  # the optimizer is outside: nothing may be open while it steps
    run(batch(rank, 8))
    assert (run.steps, run.pending) == (8, 0)
    run._graphs.updates = True
    run(batch(rank, 9))
    run.close()
    assert (run.steps, run.pending) == (9, 0)
    model.state_dict()


def test_when_verdicts_are_read() -> None:
    run_ranks(late_readers, 2)


def test_without_graphs_every_step_is_checked() -> None:
    model = nn.Linear(2, 2)
    run = StepRunner(
        lambda x: model(x).sum().backward(),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        capture="never",
        check="deferred",
    )
    run(torch.ones(1, 2))
    assert (run.steps, run.pending) == (1, 0)
    with pytest.raises(ConfigError, match="check must be 'every_step' or 'deferred', got 'sometimes'"):
        StepRunner(print, model=model, optimizer=torch.optim.SGD(model.parameters()), check="sometimes")
