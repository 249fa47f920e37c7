"""The step runner: weights equal eager mode's bit for bit, and a failed step leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ep_comm.layers
from ep_comm import (
    BudgetExceededError,
    ConfigError,
    Dispatcher,
    EPConfig,
    EPError,
    PeerLostError,
    RoutingError,
    StepRunner,
)
from ep_comm.naming import named_dispatchers
from ep_comm.snapshot import StateSnapshot

from .harness import run_ranks
from .tiny_model import EXPERTS, HIDDEN, Model, assert_same_state, batch, config, state_of, step_fn

STEPS = 6


def train(
    rank: int,
    world_size: int,
    steps: int,
    changes: dict[str, Any],
    recompute: bool,
    micro_batches: int,
    group: dist.ProcessGroup | None = None,
    start: dict[str, Any] | None = None,
) -> tuple[dict[str, Tensor], StepRunner, list[float]]:
    """Train the tiny model and return its state, the runner and the losses."""
    torch.manual_seed(7 + rank)
    model = Model(config(**changes), recompute=recompute, group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = StepRunner(step_fn(model), model=model, optimizer=optimizer)
    if start is not None:
        run.load_state_dict(start)
    losses = [run(batch(rank, step, micro_batches)) for step in range(steps)]
    return state_of(model, optimizer), run, losses


def compare_modes(rank: int, world_size: int, changes: dict[str, Any], recompute: bool, micro: int) -> tuple:
    """(replays, overflows by layer) of a static run that must equal the eager run."""
    formats = {key: value for key, value in changes.items() if key.endswith("dtype")}
    eager, _, eager_losses = train(rank, world_size, STEPS, {"mode": "eager", **formats}, recompute, micro)
    static, run, losses = train(rank, world_size, STEPS, {"mode": "static", **changes}, recompute, micro)
    assert losses == eager_losses
    assert_same_state(static, eager)
    assert run.steps == STEPS
    return run.replays, [layer.overflows for layer in run.budgets()], run.budgets()


MXFP8 = {"dispatch_forward_dtype": "mxfp8", "combine_backward_dtype": "mxfp8"}


@pytest.mark.parametrize(
    ("changes", "recompute", "micro_batches", "replays_at_least"),
    [
        ({"budget_rows": 1}, False, 1, 2),
        ({"budget_rows": 1, **MXFP8}, False, 2, 2),
        ({"budget_rows": 1, "pair_rows": 1}, True, 1, 2),
        ({"budget_rows": 24, **MXFP8}, True, 2, 1),
        ({"budget_rows": 200, "pair_rows": 1}, False, 1, 1),
        ({"capacity_factor": 100.0}, True, 2, 0),
    ],
)
def test_static_training_equals_eager_whatever_the_budget(
    changes: dict[str, Any], recompute: bool, micro_batches: int, replays_at_least: int
) -> None:
    """Dropout, router biases, uneven and empty batches, accumulation and recomputation are in the step."""
    results = run_ranks(compare_modes, 2, changes, recompute, micro_batches)
    replays = results[0][0]
    assert replays >= replays_at_least
    assert all(result[0] == replays for result in results)
    if replays_at_least == 0:
        assert replays == 0
    for _, _, budgets in results:
        for layer in budgets:
            assert layer.name in ("layers.0", "layers.1")
            assert layer.required_peak_rows <= layer.budget_rows
            assert layer.budget_rows <= max(layer.start_rows, layer.worst_case_rows)


def test_every_overflow_costs_one_replay() -> None:
    """However many layers overflow, a step is tried twice at most, and as often on every rank."""
    attempts, replays = zip(*run_ranks(count_attempts, 2), strict=True)
    assert attempts[0] == attempts[1]
    assert max(attempts[0]) == 2
    assert sum(attempts[0]) == len(attempts[0]) + replays[0] and replays[0] >= 2


def count_attempts(rank: int, world_size: int) -> tuple[list[int], int]:
    model = Model(config("static", budget_rows=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attempts = [0]
    inner = step_fn(model)

    def counting(micro_batches: Any) -> float:
        attempts[-1] += 1
        return inner(micro_batches)

    run = StepRunner(counting, model=model, optimizer=optimizer, headroom=0.0)
    few, many = [(torch.ones(2, HIDDEN), torch.ones(2, HIDDEN))], [(torch.ones(12, HIDDEN), torch.ones(12, HIDDEN))]
    for inputs in (few, few, many, many):
        run(inputs)
        attempts.append(0)
    return attempts[:-1], run.replays


def test_budgets_survive_a_state_dict() -> None:
    """A runner that starts with another's budgets does not overflow again, and says the same of them."""
    run_ranks(resume_budgets, 2)


def resume_budgets(rank: int, world_size: int) -> None:
    changes = {"mode": "static", "budget_rows": 1}
    _, first, _ = train(rank, world_size, STEPS, changes, False, 1)
    _, second, _ = train(rank, world_size, STEPS, changes, False, 1, start=first.state_dict())
    assert first.replays > 0
    assert second.replays == first.replays
    assert second.steps == 2 * STEPS
    assert [layer.budget_rows for layer in second.budgets()] == [layer.budget_rows for layer in first.budgets()]
    assert [layer.start_rows for layer in second.budgets()] == [4, 4]


def test_ceiling_raises_everywhere_and_changes_nothing() -> None:
    messages = run_ranks(hit_ceiling, 2)
    assert messages[0] == messages[1]
    assert "layers.0" in messages[0] or "layers.1" in messages[0]


def hit_ceiling(rank: int, world_size: int) -> str:
    torch.manual_seed(3)
    model = Model(config("static", budget_rows=4, max_budget_rows=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    extra = torch.zeros(1)
    inner = step_fn(model)

    def counting(micro_batches: Any) -> float:
        extra.add_(1)
        return inner(micro_batches)

    run = StepRunner(counting, model=model, optimizer=optimizer, extra_state=[extra])
    small = [(torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1)), torch.zeros(1, HIDDEN))]
    run(small)
    before, rng, steps = state_of(model, optimizer), torch.get_rng_state(), run.steps
    with pytest.raises(BudgetExceededError) as caught:
        run(_full_batch())
    error = caught.value
    assert error.required_rows > error.allowed_rows == 8
    assert error.rank in (0, 1) and str(error.required_rows) in str(error)
    assert_same_state(state_of(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), rng) and float(extra) == steps == run.steps
    assert all(parameter.grad is None for parameter in model.parameters())
    run(small)
    assert run.steps == steps + 1
    return str(error)


def _full_batch() -> list[tuple[Tensor, Tensor]]:
    make = torch.Generator().manual_seed(5)
    return [(torch.randn(12, HIDDEN, generator=make), torch.zeros(12, HIDDEN))]


def test_memory_that_is_not_there() -> None:
    messages = run_ranks(grow_without_memory, 2)
    assert messages[0] == messages[1] and "free" in messages[0]


def grow_without_memory(rank: int, world_size: int) -> str:
    model = Model(config("static", budget_rows=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = StepRunner(step_fn(model), model=model, optimizer=optimizer)
    before = state_of(model, optimizer)
    real = ep_comm.layers.free_memory
    # Only rank 1 is short: the other must raise too.
    ep_comm.layers.free_memory = lambda device: 0 if rank == 1 else 2**60
    try:
        with pytest.raises(BudgetExceededError) as caught:
            run(_full_batch())
    finally:
        ep_comm.layers.free_memory = real
    assert_same_state(state_of(model, optimizer), before)
    run(_full_batch())
    return str(caught.value)


def test_invalid_ids_are_raised_at_the_check_and_rolled_back() -> None:
    messages = run_ranks(invalid_id, 2)
    assert messages[0] == messages[1]
    assert "rank 1" in messages[0] and "expert id 99" in messages[0] and "token 2, slot 1" in messages[0]


def invalid_id(rank: int, world_size: int) -> str:
    settings = config("static", capacity_factor=4.0)
    model = nn.Linear(HIDDEN, HIDDEN)
    model.dispatcher = Dispatcher(settings)
    model.register_buffer("count", torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(bad: bool) -> None:
        idx = torch.arange(8).view(4, 2) % EXPERTS
        if bad and rank == 1:
            idx[2, 1] = 99
        model.count += 1
        rows = model.dispatcher.dispatch(model(torch.ones(4, HIDDEN)), idx, torch.ones(4, 2))
        model.dispatcher.combine(rows.tokens, rows.handle).sum().backward()

    run = StepRunner(step, model=model, optimizer=optimizer)
    run(False)
    before = state_of(model, optimizer)
    with pytest.raises(RoutingError) as caught:
        run(True)
    assert_same_state(state_of(model, optimizer), before)
    run(False)
    assert run.steps == 2 and float(model.count) == 2
    return str(caught.value)


def test_step_that_raises_is_rolled_back() -> None:
    model = Model(config("static", capacity_factor=4.0))
    optimizer = torch.optim.AdamW(model.parameters())
    inner = step_fn(model)

    def step(inputs: Any) -> float:
        loss = inner(inputs)
        random.random(), numpy.random.rand()
        if armed:
            raise ZeroDivisionError("user code")
        return loss

    good, armed = _full_batch(), []
    run = StepRunner(step, model=model, optimizer=optimizer)
    run(good)
    armed.append(True)
    before, rng = state_of(model, optimizer), (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1])
    with pytest.raises(ZeroDivisionError):
        run(good)
    armed.clear()
    assert_same_state(state_of(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), rng[0]) and random.getstate() == rng[1]
    assert (numpy.random.get_state()[1] == rng[2]).all()
    run(good)


def test_replicas_of_an_expert_parallel_group_replay_together() -> None:
    """2 replicas of 2 expert-parallel ranks: one replica overflows, all four ranks replay."""
    replays = run_ranks(two_replicas, 4)
    assert replays == [1] * 4


def two_replicas(rank: int, world_size: int) -> int:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    model = Model(config("static", budget_rows=8), group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = StepRunner(step_fn(model), model=model, optimizer=optimizer)
    tokens = 12 if rank == 3 else 1
    make = torch.Generator().manual_seed(rank)
    run([(torch.randn(tokens, HIDDEN, generator=make), torch.zeros(tokens, HIDDEN))])
    for own in groups:
        if own is group:
            dist.destroy_process_group(own)
    return run.replays


def test_ceiling_of_one_replica_stops_all() -> None:
    results = run_ranks(one_replica_exceeds, 4)
    assert all("BudgetExceededError" in text for text in results)
    assert "on other ranks" in results[0] and "layers.0: rank" in results[3]


def one_replica_exceeds(rank: int, world_size: int) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    model = Model(config("static", budget_rows=8, max_budget_rows=8), group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = StepRunner(step_fn(model), model=model, optimizer=optimizer)
    tokens = 12 if rank == 3 else 1
    try:
        run([(torch.randn(tokens, HIDDEN), torch.zeros(tokens, HIDDEN))])
    except EPError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group(group)
    return "no error"


def test_runner_arguments() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for bad in ({"capture": "sometimes"}, {"check": "never"}, {"headroom": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            StepRunner(print, model=model, optimizer=optimizer, **bad)
    for bad in ({"extra_state": [3]}, {"optimizer": None}, {"optimizer": [3]}, {"model": print}, {"headroom": "a"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            StepRunner(print, **{"model": model, "optimizer": optimizer, **bad})
    with pytest.raises(ConfigError, match="state"):
        StepRunner(print, model=model, optimizer=optimizer).load_state_dict({"steps": 3})


def test_runner_without_any_dispatcher_just_trains() -> None:
    model = nn.Linear(2, 1)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    run = StepRunner(lambda x: model(x).sum().backward(), model=model, optimizer=optimizers)
    before = model.weight.detach().clone()
    run(torch.ones(3, 2))
    assert torch.allclose(model.weight, before - 0.3) and run.steps == 1 and run.budgets() == []


def test_snapshot_restores_replaced_buffers_and_objects() -> None:
    model = nn.BatchNorm1d(3)
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    snapshot = StateSnapshot(model, (), [schedule])
    before = snapshot.take()
    original, epoch = model.running_mean, schedule.last_epoch
    model(torch.randn(8, 3))
    model.running_mean = torch.ones(3)
    schedule.last_epoch = 17
    snapshot.restore(before)
    assert model.running_mean is original and float(original.abs().sum()) == 0.0
    assert int(model.num_batches_tracked) == 0 and schedule.last_epoch == epoch


def test_a_lost_rank_is_not_hidden_by_the_runner() -> None:
    assert issubclass(PeerLostError, EPError) and issubclass(BudgetExceededError, EPError)
    assert isinstance(config("static"), EPConfig)


def test_dropping_by_choice_keeps_the_step() -> None:
    """overflow="drop": no replay, no growth; the losses differ from eager's, and the runner counts the steps."""
    for replays, overflows, budget, same in run_ranks(train_dropping, 2):
        assert replays == 0 and overflows > 0 and budget == 4 and not same


def train_dropping(rank: int, world_size: int) -> tuple[int, int, int, bool]:
    _, _, eager_losses = train(rank, world_size, 3, {"mode": "eager"}, False, 1)
    changes = {"mode": "static", "budget_rows": 4, "overflow": "drop"}
    _, run, losses = train(rank, world_size, 3, changes, False, 1)
    layer = run.budgets()[0]
    return run.replays, layer.overflows, layer.budget_rows, losses == eager_losses


def test_a_layer_that_drops_goes_on_dropping_in_a_replay() -> None:
    """One layer drops, the other replays: the replayed step keeps the first one's losses of rows."""
    run_ranks(mixed_policies, 2)


def mixed_policies(rank: int, world_size: int) -> None:
    states = []
    for budget in (4, 1000):
        torch.manual_seed(1)
        model = Model(config("static", budget_rows=budget))
        model.layers[0].dispatcher.close()
        model.layers[0].dispatcher = Dispatcher(config("static", budget_rows=8, overflow="drop"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = StepRunner(step_fn(model), model=model, optimizer=optimizer)
        run(_full_batch())
        assert run.replays == (1 if budget == 4 else 0)
        assert run.budgets()[0].budget_rows == 8 and run.budgets()[0].overflows == 1
        states.append(state_of(model, optimizer))
    assert_same_state(*states)


def test_what_no_optimizer_steps_goes_back_too() -> None:
    """Gradients of frozen parameters and of the batch, buffers that appear in the step, a generator."""
    run_ranks(leave_no_trace, 2)


def leave_no_trace(rank: int, world_size: int) -> None:
    seen = []
    for budget in (1000, 4):
        torch.manual_seed(1)
        model = Model(config("static", budget_rows=budget))
        model.probe = nn.Linear(HIDDEN, HIDDEN)
        model.register_buffer("late", None)
        optimizer = torch.optim.SGD([*model.layers.parameters()], lr=0.01)
        generator = torch.Generator().manual_seed(3)
        inner = step_fn(model)

        def step(micro_batches: Any, model: Model = model, inner: Any = inner, gen: Any = generator) -> float:
            (x, target), *_ = micro_batches
            x = model.probe(x) + torch.rand(x.shape, generator=gen)
            model.late = torch.zeros(1) if model.late is None else model.late
            model.late += 1
            if not hasattr(model, "later"):
                model.register_buffer("later", torch.zeros(1))
            model.later += 1
            return inner([(x, target)])

        run = StepRunner(step, model=model, optimizer=optimizer, extra_state=[generator])
        leaf = torch.ones(12, HIDDEN).requires_grad_()
        for _ in range(2):
            run([(leaf, torch.zeros(12, HIDDEN))])
        assert (run.replays > 0) == (budget == 4)
        assert float(model.late) == float(model.later) == 2
        seen.append((leaf.grad, *(p.grad for p in model.probe.parameters()), generator.get_state()))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_stepping_inside_the_step_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    run = StepRunner(step, model=model, optimizer=optimizer)
    before = model.weight.detach().clone()
    with pytest.raises(EPError, match=r"inside step_fn"):
        run(torch.ones(3, 2))
    assert torch.equal(model.weight, before)
    optimizer.step()


def test_runners_do_not_nest() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = StepRunner(lambda x: model(x).sum().backward(), model=model, optimizer=optimizer)
    outer = StepRunner(inner, model=model, optimizer=optimizer)
    with pytest.raises(EPError, match="another StepRunner"):
        outer(torch.ones(3, 2))
    inner(torch.ones(3, 2))


def test_dispatchers_are_named_by_where_they_are() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    made = [Dispatcher(config("static")) for _ in range(5)]
    model[0].only = made[0]
    model[1].first, model[1].pair, model[1].by_name = made[1], [made[2], made[3]], {"x": made[4]}
    names = ["0", "1.first", "1.pair.0", "1.pair.1", "1.by_name.x"]
    found = named_dispatchers(model)
    assert list(found) == names and all(found[n] is d for n, d in zip(names, made, strict=True))


def test_one_rank_may_have_a_dispatcher_of_a_smaller_group() -> None:
    run_ranks(smaller_group, 2)


def smaller_group(rank: int, world_size: int) -> None:
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    shared, own = Dispatcher(config("static", budget_rows=8)), Dispatcher(config("static", budget_rows=1000), alone)
    model = nn.Linear(HIDDEN, HIDDEN)
    used = [shared, *([own] if rank == 1 else [])]

    def step(x: Tensor) -> None:
        for dispatcher in used:
            rows = dispatcher.dispatch(model(x), torch.zeros(len(x), 2, dtype=torch.int64), torch.ones(len(x), 2))
            x = dispatcher.combine(rows.tokens, rows.handle)
        x.sum().backward()

    run = StepRunner(step, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(2):
        run(torch.ones(5, HIDDEN))
    assert run.replays == 1
