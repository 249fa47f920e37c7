"""torchtitan's dispatcher interface: the same outputs and gradients as its own all-to-all dispatcher."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_ranks
from tests.integrations import titan
from tests.integrations.test_examples import REPO, run_script

_WHY = titan.missing()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY)

EXPERTS, TOP_K, HIDDEN, TOKENS = 6, 2, 16, 9

FACTORY = "ep_comm.integrations.torchtitan.token_dispatcher"


def block(local_experts: int, settings: dict[str, Any] | None) -> Any:
    """torchtitan's routed experts, with the override applied as its command line does unless ``settings`` is None."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=HIDDEN, hidden_dim=32, num_experts=local_experts),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K),
    )
    if settings is not None:
        apply_overrides(OverrideConfig(imports=[(FACTORY, settings)]), config)
    return config.build()


def test_override_is_applied() -> None:
    from ep_comm.integrations.torchtitan import EPCommTokenDispatcher

    dispatcher = block(EXPERTS, {"mode": "static", "capacity_factor": 2.0}).token_dispatcher
    assert isinstance(dispatcher, EPCommTokenDispatcher)
    assert (dispatcher.num_experts, dispatcher.top_k) == (EXPERTS, TOP_K)


def test_mistakes_are_named() -> None:
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from ep_comm import ConfigError
    from ep_comm.integrations.torchtitan import token_dispatcher

    theirs = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    with pytest.raises(ConfigError, match="top_k cannot be given"):
        token_dispatcher(theirs, top_k=3)
    with pytest.raises(ConfigError, match="capacity"):
        token_dispatcher(theirs, capacity=3)
    with pytest.raises(ConfigError, match="mode must be one of"):
        token_dispatcher(theirs, mode="fast")
    with pytest.raises(ConfigError, match="recv_format must be 'bf16'"):
        token_dispatcher(theirs, recv_format="mxfp8")


def test_routed_experts_give_what_they_give_with_their_dispatcher() -> None:
    """torchtitan's own block, whose experts compute in BF16: to a few units in the last place of BF16."""
    for theirs, *ours in run_ranks(run_blocks, 2, timeout=150):
        for got in ours:
            for tensor, expected in zip(got, theirs, strict=True):
                torch.testing.assert_close(tensor, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def run_blocks(rank: int, world_size: int) -> list[list[Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("default")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ep",))
    outcomes = []
    for settings in (None, {}, {"mode": "static", "capacity_factor": 2.0 * world_size}):
        experts = block(EXPERTS // world_size, settings)
        experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
        for index, parameter in enumerate(experts.parameters()):
            make = torch.Generator().manual_seed(10 * rank + index)
            parameter.data = torch.randn(parameter.shape, generator=make) / 4
        make = torch.Generator().manual_seed(rank)
        x = torch.randn(1, TOKENS, HIDDEN, generator=make, requires_grad=True)
        scores, ids = torch.rand(1, TOKENS, EXPERTS, generator=make).topk(TOP_K)
        y = experts(x, scores.requires_grad_(), ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
        (y * torch.randn(y.shape, generator=make)).sum().backward()
        outcomes.append([y.detach(), x.grad, scores.grad, *(p.grad for p in experts.parameters())])
    return outcomes


@pytest.mark.parametrize("expert_parallel", [True, False])
def test_gives_what_their_dispatcher_gives(expert_parallel: bool) -> None:
    for outcomes in run_ranks(run_each, 2, expert_parallel):
        expected = outcomes["theirs"]
        for name, got in outcomes.items():
            for ours, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def run_each(rank: int, world_size: int, expert_parallel: bool) -> dict[str, list[Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from ep_comm.integrations.torchtitan import token_dispatcher

    set_spmd_backend("default")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ep",)) if expert_parallel else None
    config = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    static = {"mode": "static", "capacity_factor": 2.0 * world_size}
    candidates: dict[str, Any] = {
        "theirs": config.build(),
        "eager": token_dispatcher(config).build(),
        "unpadded": token_dispatcher(config, alignment=1).build(),
        "static": token_dispatcher(config, **static).build(),
    }
    outcomes = {}
    for name, dispatcher in candidates.items():
        dispatcher.wire_meshes(ep_mesh=mesh)
        outcomes[name] = one_step(dispatcher, rank, world_size if expert_parallel else 1)
    return outcomes


def one_step(dispatcher: Any, rank: int, ep_size: int) -> list[Tensor]:
    """Output and gradients of tokens, scores and expert matrices."""
    make = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=make, requires_grad=True)
    scores, ids = torch.rand(TOKENS, EXPERTS, generator=make).topk(TOP_K)
    scores.requires_grad_()
    all_experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(99))
    local = EXPERTS // ep_size
    first = rank * local if ep_size > 1 else 0
    experts = all_experts[first : first + local].clone().requires_grad_()
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    rows, per_expert, metadata = dispatcher.dispatch(x, scores, ids, counts)
    parts = rows.split([*per_expert.tolist(), rows.shape[0] - int(per_expert.sum())])
    output = torch.cat(
        [*(torch.tanh(part @ expert) for part, expert in zip(parts[:-1], experts, strict=True)), parts[-1]]
    )
    y = dispatcher.combine(output, metadata, x)
    (y * torch.randn(TOKENS, HIDDEN, generator=make)).sum().backward()
    return [y.detach(), x.grad, scores.grad, experts.grad]


def test_selective_checkpointing_sends_nothing_again() -> None:
    """torchtitan's SelectiveAC keeps what arrived; its full checkpointing sends the tokens again."""
    forward = ["dispatch_forward", "combine_forward"]
    backward = ["combine_backward", "dispatch_backward"]
    for outcomes in run_ranks(checkpoint_blocks, 2):
        (expected, moved), (selective, moved_selective), (full, moved_full) = outcomes
        assert moved == moved_selective == forward + backward
        assert moved_full == forward + forward + backward
        for got in (selective, full):
            for tensor, reference in zip(got, expected, strict=True):
                assert torch.equal(tensor, reference)


def checkpoint_blocks(rank: int, world_size: int) -> list[tuple[list[Tensor], list[str]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.utils import set_spmd_backend

    from ep_comm.directions import Channel

    set_spmd_backend("default")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ep",))
    moved: list[str] = []
    methods = {name: value for name, value in vars(Channel).items() if name.startswith(("dispatch_", "combine_"))}
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("dispatch_forward", "dispatch_backward", "combine_forward", "combine_backward"):
            patch.setattr(Channel, name, lambda *args, n=name: (moved.append(n), methods[n](*args))[1])
        for policy in (None, SelectiveAC, FullAC):
            model = torch.nn.Module()
            experts = block(EXPERTS // world_size, {})
            model.layers = torch.nn.ModuleDict({"0": experts})
            experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
            for index, parameter in enumerate(experts.parameters()):
                make = torch.Generator().manual_seed(10 * rank + index)
                parameter.data = torch.randn(parameter.shape, generator=make) / 4
            if policy is SelectiveAC:
                SelectiveAC(SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[])).apply(model)
            elif policy is FullAC:
                FullAC(FullAC.Config()).apply(model)
            make = torch.Generator().manual_seed(rank)
            x = torch.randn(1, TOKENS, HIDDEN, generator=make, requires_grad=True)
            scores, ids = torch.rand(1, TOKENS, EXPERTS, generator=make).topk(TOP_K)
            y = model.layers["0"](x, scores.requires_grad_(), ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
            (y * torch.randn(y.shape, generator=make)).sum().backward()
            outcomes.append(([y.detach(), x.grad, scores.grad, *(p.grad for p in model.parameters())], moved[:]))
            moved.clear()
    return outcomes


def test_example() -> None:
    script = str(REPO / "scripts" / "examples" / "torchtitan_experts.py")
    printed = run_ranks(run_example, 2, script, fresh=True, timeout=150)[0]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert "tokens moved by ep_comm, collective transport" in printed


def run_example(rank: int, world_size: int, script: str) -> str:
    """On a rank that has imported this module, and with it what makes torchtitan work without Triton."""
    return run_script(rank, world_size, script, ["--steps", "20"])
