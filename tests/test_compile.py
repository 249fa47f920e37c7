"""torch.compile: static mode in one graph with the bits of uncompiled code, eager mode beside the graph."""

from __future__ import annotations

import functools
import gc
import shutil
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ep_comm import ArgumentError, Dispatcher, EPConfig, HandleError, MoELayer, StepRunner
from ep_comm.directions import Channel

from .harness import Caught, expect_error, run_ranks

HIDDEN, EXPERTS, TOP_K, TOKENS = 32, 4, 2, 12
MXFP8 = {"dispatch_forward_dtype": "mxfp8", "combine_backward_dtype": "mxfp8"}

# Compiling takes the time; the backend that runs the traced operators one by one gives the bits of uncompiled code.
compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)


def config(**changes: Any) -> EPConfig:
    values = {"mode": "static", "alignment": 4, **changes}
    return EPConfig(EXPERTS, TOP_K, HIDDEN, max_tokens_per_rank=TOKENS, **values)


def inputs(seed: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, expert ids and weights; the floating ones are leaves that require gradients."""
    make = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(tokens, EXPERTS, generator=make).topk(TOP_K)
    return torch.randn(tokens, HIDDEN, generator=make).requires_grad_(), ids, weights.requires_grad_()


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


# -- a model through the step runner -----------------------------------------------------------------------


class Model(nn.Module):
    """An MoE layer that is recomputed, with MXFP8 on the wire and all that a router can have."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        small = {"mode": mode, **({"budget_rows": 4, "pair_rows": 1} if mode == "static" else {}), **MXFP8}
        more = {"bias_update_rate": 0.1, "aux_loss_coeff": 0.01, "shared_ffn_size": 16, "score": "sigmoid"}
        self.layer = MoELayer(HIDDEN, 48, EXPERTS, TOP_K, config(**small), seed=2, dtype=torch.bfloat16, **more)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.layer, x, use_reentrant=False)


def train(rank: int, mode: str, call: Any) -> tuple[list[Tensor], StepRunner]:
    """Outputs and input gradients of every step and what the model holds at the end; the runner."""
    torch.manual_seed(rank)
    model = Model(mode)
    run = call(model)
    latest: list[Tensor] = []

    def step(x: Tensor) -> None:
        y = run(x)
        y.float().square().sum().backward()
        for parameter in model.parameters():
            if not getattr(parameter, "ep_expert", False):
                dist.all_reduce(parameter.grad)
        model.layer.router.update_bias()
        latest[:] = [y.detach(), x.grad]

    runner = StepRunner(step, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    seen: list[Tensor] = []
    for number, tokens in enumerate((12, 9, 6)):
        runner(inputs(10 * number + rank, tokens - 3 * rank)[0].detach().bfloat16().requires_grad_())
        seen += latest
    return [*seen, *(t.detach().clone() for t in (*model.parameters(), *model.buffers()))], runner


def train_both(rank: int, world_size: int) -> tuple[int, int, list[tuple[int, int]]]:
    """Asserts equal bits; returns replays, dispatches by operators, and budgets of the compiled run."""
    from ep_comm import operators

    expected, _ = train(rank, "eager", lambda model: model)
    before = next(operators._numbers)
    got, runner = train(rank, "static", compiled)
    issued = next(operators._numbers) - before - 1
    assert_equal(got, expected)
    gc.collect()
    assert not operators._tickets
    return runner.replays, issued, [(layer.start_rows, layer.budget_rows) for layer in runner.budgets()]


def test_training_compiled_gives_the_bits_of_eager_mode() -> None:
    """From budgets that are far too small: replays run uncompiled, larger budgets are compiled anew."""
    for replays, issued, budgets in run_ranks(train_both, 2, timeout=150):
        assert 1 <= replays < 3
        # The first attempt of every step is compiled: one dispatch, and one to recompute it.
        assert issued == 3 * 2
        assert all(budget > start for start, budget in budgets)


# -- the dispatcher by itself ------------------------------------------------------------------------------


def two_in_flight(first: Dispatcher, second: Dispatcher, a: Any, b: Any) -> Tensor:
    """Dispatch A, dispatch B, combine A, combine B; with and without weights."""
    rows_a, rows_b = first.dispatch(*a), second.dispatch(*b)
    out_a = first.combine(rows_a.tokens.sin(), rows_a.handle, apply_weights=True)
    out_b = second.combine(rows_b.tokens * rows_b.weights[:, None], rows_b.handle)
    return out_a + out_b * rows_b.tokens_per_expert.sum() + rows_a.expert_offsets[-1]


def outcome(call: Any, first: Dispatcher, second: Dispatcher, seed: int, tokens: int = TOKENS) -> list[Tensor]:
    a, b = inputs(seed, tokens), inputs(seed + 1, tokens)
    y = call(first, second, a, b)
    y.backward(torch.cos(y.detach()))
    return [y.detach(), a[0].grad, a[2].grad, b[0].grad, b[2].grad]


def use_dispatchers(rank: int, world_size: int) -> dict[str, Any]:
    from ep_comm import operators

    found: dict[str, Any] = {}
    roomy = config(capacity_factor=float(world_size))
    first, second = Dispatcher(roomy), Dispatcher(config(budget_rows=4, **MXFP8))
    run = compiled(two_in_flight)
    for name, growth in (("overflow", 0), ("grown", 52)):
        second.grow(growth)
        assert_equal(outcome(run, first, second, rank), outcome(two_in_flight, first, second, rank))
        found[name] = second.overflowed, second.budget_rows

    # Another number of tokens on each rank and each call; handles go with the graph that holds them.
    for number in range(100):
        outcome(run, first, second, number, tokens=2 * ((number + 3 * rank) % 7))
    y = run(first, second, inputs(0), inputs(1))
    found["alive"] = len(operators._tickets)
    del y
    gc.collect()
    found["left"] = len(operators._tickets)
    with torch.no_grad():
        assert torch.equal(run(first, second, inputs(0), inputs(1)), two_in_flight(first, second, inputs(0), inputs(1)))
    found["recompiled often"] = torch._dynamo.utils.counters["frames"]["total"] > 12

    # A graph that ends between dispatch and combine.
    rows = compiled(lambda *a: first.dispatch(*a))(*inputs(3))
    plain = first.dispatch(*inputs(3))
    assert_equal([first.combine(rows.tokens, rows.handle)], [first.combine(plain.tokens, plain.handle)])
    found["foreign handle"] = expect_error(second.combine, rows.tokens, rows.handle)
    found["uncompiled handle"] = expect_error(compiled(lambda: first.combine(plain.tokens, plain.handle)))
    x, ids, weights = inputs(4)
    found["bad width"] = expect_error(compiled(lambda *a: first.dispatch(*a).tokens), x[:, :16].detach(), ids, weights)
    return found


def test_dispatchers_compiled() -> None:
    for found in run_ranks(use_dispatchers, 2, timeout=150):
        assert found["overflow"] == (True, 4) and found["grown"] == (False, 52)
        assert found["alive"] == 2 and found["left"] == 0
        assert not found["recompiled often"]
        assert found["foreign handle"].type == HandleError.__name__
        assert "a dispatch that was not compiled" in found["uncompiled handle"].message
        assert found["bad width"].type == ArgumentError.__name__ and "hidden_size" in found["bad width"].message


def break_graphs(rank: int, world_size: int) -> list[Caught]:
    """Eager mode, and rows in MXFP8, run beside the graph; fullgraph=True says why."""
    errors = []
    for changes in ({"mode": "eager"}, {"recv_format": "mxfp8", **MXFP8}):
        dispatcher = Dispatcher(config(**changes))

        def step(x: Tensor, ids: Tensor, weights: Tensor, dispatcher: Dispatcher = dispatcher) -> Tensor:
            rows = dispatcher.dispatch(x * 2, ids, weights.sigmoid())
            tokens = rows.tokens.dequantize(torch.float32) if dispatcher.config.recv_format == "mxfp8" else rows.tokens
            return dispatcher.combine(tokens.sin(), rows.handle, apply_weights=True).cos()

        given, again = inputs(rank), inputs(rank)
        torch.compiler.reset()  # else the code compiled for the other dispatcher would be taken up to its break
        errors.append(expect_error(compiled(step), *given))
        y, z = step(*given), torch.compile(step, backend="aot_eager")(*again)
        for result in (y, z):
            result.sum().backward()
        assert_equal([z, again[0].grad, again[2].grad], [y, given[0].grad, given[2].grad])
    return errors


def test_what_does_not_compile_breaks_the_graph() -> None:
    for errors in run_ranks(break_graphs, 2, timeout=150):
        assert all("mode='static' with recv_format='bf16' compiles" in error.message for error in errors)


# -- one process -------------------------------------------------------------------------------------------


@pytest.fixture
def directions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions in which rows were moved, in order."""
    moved: list[str] = []

    def watch(name: str) -> None:
        method = getattr(Channel, name)

        def spy(self: Channel, *args: Any) -> Any:
            moved.append(name)
            return method(self, *args)

        monkeypatch.setattr(Channel, name, spy)

    for name in ("dispatch_forward", "dispatch_backward", "combine_forward", "combine_backward"):
        watch(name)
    return moved


def test_recomputation_around_compiled_code(directions: list[str]) -> None:
    """A checkpoint around a compiled layer: the router's statistics count a forward pass once."""
    layers = [
        MoELayer(HIDDEN, 48, EXPERTS, TOP_K, config(), seed=1, dtype=torch.bfloat16, aux_loss_coeff=0.1)
        for _ in range(2)
    ]
    calls = compiled(layers[0]), layers[1]
    seen = []
    for layer, call in zip(layers, calls, strict=True):
        x = inputs(0)[0].detach().bfloat16().requires_grad_()
        y = checkpoint(call, x, use_reentrant=False)
        y.float().sum().backward()
        seen.append([y.detach(), x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
    assert_equal(*seen)
    assert directions[:4] == ["dispatch_forward", "combine_forward", "dispatch_forward", "combine_forward"]


def test_selective_checkpointing_saves_what_was_moved(directions: list[str]) -> None:
    """Uncompiled: the policy sees the operators, so rows that arrived once are not sent again."""
    from ep_comm import operators

    save = [torch.ops.ep_comm.dispatch.default, torch.ops.ep_comm.combine.default]
    with Dispatcher(config(mode="eager")) as dispatcher:

        def block(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            rows = operators.dispatch(dispatcher, x.sin(), ids, weights)
            return dispatcher.combine(rows.tokens.exp(), rows.handle, apply_weights=True).cos()

        results = []
        for selective in (False, True):
            given = inputs(0)
            context = functools.partial(create_selective_checkpoint_contexts, save)
            y = checkpoint(block, *given, use_reentrant=False, context_fn=context) if selective else block(*given)
            y.sum().backward()
            results.append([y.detach(), given[0].grad, given[2].grad])
    assert_equal(*results)
    assert directions == 2 * ["dispatch_forward", "combine_forward", "combine_backward", "dispatch_backward"]
    gc.collect()
    assert not operators._tickets


def test_operators_keep_their_promises() -> None:
    """torch.library.opcheck: schemas, shapes without data, autograd. A ticket is never the same twice."""
    from ep_comm import operators

    with Dispatcher(config()) as dispatcher:
        x, ids, weights = inputs(0)
        rows = operators.dispatch(dispatcher, x, ids, weights)
        detached, ticket = rows.tokens.detach(), rows.handle.ticket
        facts = (dispatcher.number, TOKENS)
        cases: list[tuple[str, tuple[Any, ...]]] = [
            ("dispatch", (x, ids, weights, dispatcher.anchor, dispatcher.number, dispatcher.budget_rows, EXPERTS)),
            ("dispatch_backward", (detached, torch.ones_like(rows.weights), ticket, TOKENS, TOP_K)),
            ("combine", (detached.clone().requires_grad_(), rows.weights.detach(), ticket, *facts, True)),
            ("combine", (detached.clone().requires_grad_(), rows.weights.detach(), ticket, *facts, False)),
            ("combine_backward", (x.detach(), ticket, len(detached))),
            ("weighted_combine_backward", (x.detach(), detached, rows.weights.detach(), ticket)),
            ("unless_recomputed", (ids, ids + 1)),
        ]
        for name, args in cases:
            checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
            if name != "dispatch":
                checks.append("test_aot_dispatch_static")
            torch.library.opcheck(getattr(torch.ops.ep_comm, name).default, args, test_utils=checks)
        copy = ticket.clone()
        del rows, ticket, cases, args
        gc.collect()
        with pytest.raises(HandleError, match="keep the original"):
            torch.ops.ep_comm.combine(detached, weights.new_ones(len(detached)), copy, *facts, False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's own backend needs a C++ compiler")
@pytest.mark.skipif(" " in sys.prefix, reason="inductor does not quote paths, and there is a space in them")
def test_inductor() -> None:
    """torch.compile's default backend, whose fused arithmetic may differ in the last bit."""
    with Dispatcher(config()) as dispatcher:

        def step(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            rows = dispatcher.dispatch(x, ids, weights)
            return dispatcher.combine(rows.tokens * 3, rows.handle, apply_weights=True)

        given, again = inputs(0), inputs(0)
        y, z = step(*given), torch.compile(step, fullgraph=True)(*again)
        for result in (y, z):
            result.sum().backward()
        for a, b in zip((y, given[0].grad, given[2].grad), (z, again[0].grad, again[2].grad), strict=True):
            torch.testing.assert_close(a, b)
