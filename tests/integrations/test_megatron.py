"""Megatron-Core's MoE layers: the same outputs and gradients as with its own dispatchers, and as dense layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.harness import Caught, expect_error, run_ranks
from tests.integrations import megatron_models as models
from tests.integrations.megatron_models import BATCH, EXPERTS, HIDDEN, SEQUENCE
from tests.integrations.test_transformers import decibels

_WHY = models.missing()
needs_megatron = pytest.mark.skipif(bool(_WHY), reason=_WHY)
pytestmark = [needs_megatron, pytest.mark.filterwarnings("ignore")]

TOKENS = SEQUENCE * BATCH
STATIC = {"mode": "static", "seq_length": SEQUENCE, "micro_batch_size": BATCH, "capacity_factor": 2.0}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}

# Changes to the configuration, changes for ep_comm alone, and what use() is told.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "eager": ({}, {}, {}),
    "static": ({}, {}, STATIC),
    "padded segments": ({}, {}, {"alignment": 16}),
    "static, padded segments": ({}, {}, {**STATIC, "alignment": 16, "capacity_factor": 3.0}),
    "shared experts": ({"moe_shared_expert_intermediate_size": 24}, {}, {}),
    "one expert a rank": ({"num_moe_experts": 2}, {}, {}),
    "counts stay on the device": ({"num_moe_experts": 2}, {}, {**STATIC, "expert_counts": "device"}),
    "all-gather": ({"moe_token_dispatcher_type": "allgather"}, {}, {}),
    "fused permutation": ({}, {"moe_permute_fusion": True}, {}),
    "tokens dropped": ({"moe_expert_capacity_factor": 0.6}, {}, {}),
    "tokens dropped, all-gather": (
        {"moe_expert_capacity_factor": 0.6, "moe_token_dispatcher_type": "allgather"},
        {},
        {},
    ),
    "tokens dropped by position": (
        {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"},
        {},
        STATIC,
    ),
    "padded to capacity": ({"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}, {}, {}),
    "padded to capacity, static": (
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {},
        STATIC,
    ),
    "weights on the input": (
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
        {},
        {},
    ),
    "bf16": (BF16, {}, {}),
    "bf16, router in fp32": ({**BF16, "moe_router_dtype": "fp32"}, {}, STATIC),
}


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"tensor": 2, "expert_tensor": 2}], ids=str)
def test_layer_gives_what_it_gives_with_megatrons_dispatcher(layout: dict[str, int]) -> None:
    # Megatron's all-to-all dispatcher gathers split experts' rows in unequal parts, which gloo does not do.
    names = list(CASES) if not layout else ["eager", "static", "shared experts", "tokens dropped, all-gather"]
    for results in run_ranks(compare_layers, 2, layout, names, timeout=100.0):
        for name, (theirs, ours) in results.items():
            assert theirs.keys() == ours.keys()
            for key, expected in theirs.items():
                # BF16 has 8 bits; Megatron sums a token's outputs in BF16, ep_comm in FP32.
                tolerance = 2e-2 * float(expected.abs().max()) if "bf16" in name else 1e-5
                torch.testing.assert_close(
                    ours[key], expected, rtol=0, atol=tolerance, msg=lambda m, k=key, n=name: f"{n}, {k}: {m}"
                )


def compare_layers(rank: int, world_size: int, layout: dict[str, int], names: list[str]) -> dict[str, Any]:
    from ep_comm.integrations import megatron

    results = {}
    with models.parallel_state(world_size, **layout):
        for name in names:
            changes, changes_for_ours, settings = CASES[name]
            config = models.make_config(**changes)
            layer = models.make_layer(config)
            x = models.make_input(rank, config.params_dtype, SEQUENCE // layout.get("tensor", 1))
            theirs = models.run_layer(layer, x)
            for key, value in changes_for_ours.items():
                setattr(config, key, value)
            assert megatron.use(layer, **settings) is layer
            results[name] = theirs, models.run_layer(layer, x)
            assert isinstance(layer.token_dispatcher, megatron.EPTokenDispatcher)
            assert layer.ep_comm_dispatcher.config.mode == settings.get("mode", "eager")
    return results


MAPPED = [3, 5]  # tokens of each rank in the test below


def test_routing_map_alone_decides() -> None:
    results = run_ranks(run_mapped, 2)
    (x, maps, probs), matrices = zip(*map(routing_inputs, range(2)), strict=True), expert_matrices()
    for tensor in (*x, *probs, matrices):
        tensor.requires_grad_()
    dense = [
        (torch.tanh(torch.einsum("th,ehg->teg", x[r], matrices)) * (probs[r] * maps[r])[..., None]).sum(dim=1)
        for r in range(2)
    ]
    sum((y * grad_of(r)).sum() for r, y in enumerate(dense)).backward()
    arrived = sum(m.sum(dim=0) for m in maps).tolist()
    assert arrived[0] > sum(int((m & (p > 0)).sum(dim=0)[0]) for m, p in zip(maps, probs, strict=True))
    for rank, (y, grad_x, grad_probs, grad_matrices, counts) in enumerate(results):
        assert counts == arrived[rank * 2 : rank * 2 + 2]
        assert not grad_probs[~maps[rank]].any()
        expected = (dense[rank].detach(), x[rank].grad, probs[rank].grad, matrices.grad[rank * 2 : rank * 2 + 2])
        for got, want in zip((y, grad_x, grad_probs, grad_matrices), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def run_mapped(rank: int, world_size: int) -> tuple[Any, ...]:
    """The six calls of a layer, with a map and probabilities that no router made."""
    from ep_comm.integrations.megatron import EPTokenDispatcher

    x, mapped, probs = routing_inputs(rank)
    matrices = expert_matrices()[rank * 2 : rank * 2 + 2].clone()
    for tensor in (x, probs, matrices):
        tensor.requires_grad_()
    with models.parallel_state(world_size):
        dispatcher = EPTokenDispatcher(2, [rank * 2, rank * 2 + 1], models.make_config())
        sent = dispatcher.dispatch_preprocess(x.view(-1, 1, HIDDEN), mapped, probs)
        rows, counts, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
        parts = zip(rows.split(counts.tolist()), matrices, strict=True)
        output = torch.cat([torch.tanh(part @ matrix) for part, matrix in parts]) * weights[:, None]
        returned = dispatcher.token_combine(dispatcher.combine_preprocess(output))
        y = dispatcher.combine_postprocess(returned).squeeze(1)
    (y * grad_of(rank)).sum().backward()
    return y.detach(), x.grad, probs.grad, matrices.grad, counts.tolist()


def routing_inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens with 0 to 2 experts; expert 0 has the probability 0, and what is not mapped has one all the same."""
    make = torch.Generator().manual_seed(rank)
    tokens = MAPPED[rank]
    mapped = torch.zeros(tokens, EXPERTS, dtype=torch.bool)
    for token, experts in enumerate([(0, 3), (1,), (), (0, 2), (2, 3)][:tokens]):
        mapped[token, list(experts)] = True
    probs = torch.rand(tokens, EXPERTS, generator=make)
    probs[:, 0] = 0.0
    return torch.randn(tokens, HIDDEN, generator=make), mapped, probs


def expert_matrices() -> Tensor:
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(5)) / 4


def grad_of(rank: int) -> Tensor:
    return torch.randn(MAPPED[rank], HIDDEN, generator=torch.Generator().manual_seed(50 + rank))


def test_too_many_experts_for_a_token_are_an_error_on_every_rank() -> None:
    for eager, static in run_ranks(overfull, 2):
        assert eager.type == static.type == "RoutingError"
        assert "routing_map: on some rank it gives a token more than 2 experts" in eager.message


def overfull(rank: int, world_size: int) -> list[Caught]:
    from ep_comm.integrations.megatron import EPTokenDispatcher

    caught = []
    with models.parallel_state(world_size):
        for settings in ({}, STATIC):
            dispatcher = EPTokenDispatcher(2, [rank * 2, rank * 2 + 1], models.make_config(), **settings)
            mapped = torch.zeros(4, EXPERTS, dtype=torch.bool)
            mapped[0, : 2 + rank] = True

            def exchange(dispatcher: Any = dispatcher, mapped: Tensor = mapped) -> None:
                x = torch.zeros(4, 1, HIDDEN)
                dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, mapped, mapped.float()))
                dispatcher.ep_dispatcher.check()

            caught.append(expect_error(exchange))
    return caught


def test_a_marked_configuration_is_used_by_layers_that_are_built_with_it() -> None:
    for kinds, first, grown, recomputed in run_ranks(build_with_config, 2):
        assert kinds == ["EPTokenDispatcher", "MoEAlltoAllTokenDispatcher"]
        assert (first, grown) == (16, 64)
        assert all(torch.equal(a, b) for a, b in recomputed)


def build_with_config(rank: int, world_size: int) -> tuple[Any, ...]:
    import copy

    from ep_comm.integrations import megatron

    with models.parallel_state(world_size):
        config = models.make_config()
        megatron.use(config)
        layer = models.make_layer(copy.deepcopy(config))
        kinds = [type(each.token_dispatcher).__name__ for each in (layer, models.make_layer(models.make_config()))]
        x = models.make_input(rank)
        plain = models.run_layer(layer, x)
        first = layer.ep_comm_dispatcher.config.max_tokens_per_rank
        own_forward = layer.forward
        layer.forward = lambda x: checkpoint(own_forward, x, use_reentrant=False)
        again = models.run_layer(layer, x)
        # A longer batch on one rank, after it the first one again.
        layer(models.make_input(rank, sequence=SEQUENCE * (1 + 2 * rank)))
        grown = layer.ep_comm_dispatcher.config.max_tokens_per_rank
        return kinds, first, grown, [(plain[key], again[key]) for key in plain]


def test_training_with_overflows_gives_the_weights_of_eager_mode() -> None:
    for (eager, _, eager_losses), (static, replays, losses) in run_ranks(train_both, 2):
        assert replays >= 1
        assert eager.keys() == static.keys()
        assert all(torch.equal(eager[name], static[name]) for name in eager)
        assert torch.equal(eager_losses, losses)


def train_both(rank: int, world_size: int) -> list[tuple[dict[str, Tensor], int, Tensor]]:
    return [train(rank, world_size, settings) for settings in ({}, {**STATIC, "capacity_factor": 0.3})]


def train(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[dict[str, Tensor], int, Tensor]:
    import torch.distributed as dist

    from ep_comm import StepRunner
    from ep_comm.integrations import megatron
    from ep_comm.integrations.megatron_state import _router_losses

    with models.parallel_state(world_size):
        config = models.make_config(
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.01,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_dtype="fp32",
        )
        layer = models.make_layer(config)
        megatron.use(layer, **settings)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)

        def step(x: Tensor) -> None:
            y, _ = layer(x)
            y.square().mean().backward()
            dist.all_reduce(layer.router.weight.grad)

        runner = StepRunner(step, model=layer, optimizer=optimizer, extra_state=[megatron.MegatronStepState()])
        for index in range(4):
            runner(models.make_input(rank + 2 * index))
        if settings:
            (budget,) = runner.budgets()
            assert budget.name == "MoELayer" and budget.start_rows == 10 < budget.budget_rows
        losses = torch.stack([values.clone() for values in _router_losses().values()])
        for values in _router_losses().values():
            values.zero_()
        state = {name: value.clone() for name, value in layer.state_dict().items() if isinstance(value, Tensor)}
        return state | {n: b.clone() for n, b in layer.named_buffers()}, runner.replays, losses


def test_mxfp8_is_close() -> None:
    """The layer and its residual connection; the gated experts alone take 4 dB of the 32 dB that MXFP8 has."""
    for theirs, ours in run_ranks(with_mxfp8, 2):
        for key, expected in theirs.items():
            assert (28 if key == "output" else 25) <= decibels(ours[key], expected) < 60, key


def with_mxfp8(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    from ep_comm.integrations import megatron

    mxfp8 = {"dispatch_forward_dtype": "mxfp8", "combine_backward_dtype": "mxfp8"}
    with models.parallel_state(world_size):
        layer = models.make_layer(models.make_config())
        x = models.make_input(rank, sequence=64)
        results = [models.run_layer(layer, x), models.run_layer(megatron.use(layer, **mxfp8), x)]
    for result in results:
        result["output"] += x
    return results


MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"moe_shared_expert_overlap": True}, {}, "moe_shared_expert_overlap must be False"),
    ({"overlap_moe_expert_parallel_comm": True}, {}, "overlap_moe_expert_parallel_comm must be False"),
    ({"moe_paged_stash": True}, {}, "moe_paged_stash must be False"),
    ({"transformer_impl": "inference_optimized"}, {}, "transformer_impl='inference_optimized'"),
    ({"cuda_graph_impl": "local"}, {}, "cuda_graph_impl='local' with scopes of the whole layer"),
    ({}, {"top_k": 2}, "top_k cannot be given"),
    ({}, {"recv_format": "mxfp8"}, "recv_format must be 'bf16'"),
    ({}, {"mode": "static"}, "mode='static' needs max_tokens_per_rank"),
    ({}, {"mode": "static", "seq_length": 8}, "got seq_length=8 and micro_batch_size=None"),
    ({}, {"mode": "fast"}, "mode must be one of"),
    ({}, {"capacity": 2}, "fields of ep_comm.EPConfig"),
    ({}, {"expert_counts": "device"}, "expert_counts='device' needs mode='static'"),
    ({}, {"expert_counts": "gpu"}, "expert_counts must be 'host' or 'device'"),
    ({"hidden_size": 40}, {"dispatch_forward_dtype": "mxfp8"}, "hidden_size must be a multiple of 32"),
]


def test_mistakes_and_budgets() -> None:
    for caught, no_layer, budgets, aligned in run_ranks(make_mistakes, 2):
        for (_, _, message), (layer, config) in zip(MISTAKES, caught, strict=True):
            for error in (layer, config):
                assert error.type == "ConfigError" and message in error.message
        assert "target must be a TransformerConfig, a MoELayer or a model" in no_layer.message
        assert budgets == [32 * 1.5, 32 * 1.25, 32 * 2.0, 7]
        assert aligned == 32


def make_mistakes(rank: int, world_size: int) -> tuple[Any, ...]:
    from ep_comm.integrations import megatron

    caught = []
    with models.parallel_state(world_size):
        layer = models.make_layer(models.make_config())
        before = layer.token_dispatcher
        for changes, settings, _ in MISTAKES:
            # Megatron refuses some of these itself where it has what they need to run.
            config = layer.config = models.make_config()
            for key, value in changes.items():
                setattr(config, key, value)
            if "cuda_graph_impl" in changes:
                config.cuda_graph_scope = config.cuda_graph_modules = []
            caught.append([expect_error(megatron.use, target, **settings) for target in (layer, config)])
        assert layer.token_dispatcher is before
        no_layer = expect_error(megatron.use, torch.nn.Linear(2, 2))
        budgets = []
        for factor, settings in ((1.5, {}), (None, {}), (1.5, {"capacity_factor": 2.0}), (1.5, {"budget_rows": 7})):
            layer.config = models.make_config()
            layer.config.moe_expert_rank_capacity_factor = factor
            megatron.use(layer, mode="static", max_tokens_per_rank=TOKENS, **settings)
            budgets.append(layer.token_dispatcher.settings.fields["budget_rows"])
        layer.config.fp8, layer.config.fp8_recipe = "hybrid", "mxfp8"
        layer.config.moe_router_padding_for_quantization = True
        megatron.use(layer)
        return caught, no_layer, budgets, layer.token_dispatcher.settings.fields["alignment"]


def test_slots_fit_the_parallel_sizes() -> None:
    """What max_tokens_per_rank becomes: tokens of a sequence-parallel, context-parallel rank."""
    for tokens in run_ranks(token_limits, 2):
        assert tokens == [5 * 3, 9 * 3]


def token_limits(rank: int, world_size: int) -> list[int]:
    from ep_comm.integrations import megatron

    limits = []
    for layout in ({"tensor": 2}, {}):
        with models.parallel_state(world_size, **layout):
            layer = megatron.use(models.make_layer(models.make_config()), seq_length=9, micro_batch_size=3)
            limits.append(layer.token_dispatcher.settings.fields["max_tokens_per_rank"])
    return limits
