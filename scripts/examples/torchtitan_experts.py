"""Train the routed experts of torchtitan, spread over the ranks, with their tokens moved by ep_comm.

    torchrun --nproc-per-node 2 scripts/examples/torchtitan_experts.py

In a training run of torchtitan the override of ``configuration()`` stands on the command line instead:
--override.imports 'ep_comm.integrations.torchtitan.token_dispatcher={...}'. The experts learn to turn a vector round.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

import ep_comm

EXPERTS, TOP_K, DIM, TOKENS = 8, 2, 64, 128


def configuration(world_size: int) -> RoutedExperts.Config:
    """The experts of one rank, as a model of torchtitan has them, after the override."""
    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=DIM, hidden_dim=2 * DIM, num_experts=EXPERTS // world_size),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K),
    )
    settings = {"dispatch_forward_dtype": "mxfp8", "combine_backward_dtype": "mxfp8"}
    apply_overrides(OverrideConfig(imports=[("ep_comm.integrations.torchtitan.token_dispatcher", settings)]), config)
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    env = ep_comm.init_distributed()
    set_spmd_backend("default")
    torch.manual_seed(0)
    router = nn.Linear(DIM, EXPERTS, bias=False, device=env.device)  # the same on all ranks
    torch.manual_seed(1 + env.rank)
    experts = configuration(env.world_size).build()
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, device=env.device) / DIM**0.5
    mesh = init_device_mesh(env.device.type, (env.world_size,), mesh_dim_names=("ep",))
    experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    optimizer = torch.optim.AdamW([*router.parameters(), *experts.parameters()], lr=1e-2)

    for number in range(options.steps):
        x = torch.randn(1, TOKENS, DIM, device=env.device)
        scores, ids = router(x).softmax(-1).topk(TOP_K)
        y = experts(x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
        loss = (y + x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(router.weight.grad)  # of all ranks' batches, as the experts' gradients are already
        optimizer.step()
        if env.rank == 0 and number % 10 == 9:
            print(f"step {number + 1:3d}   loss {loss.item():.3f}", flush=True)
    if env.rank == 0:
        print(f"tokens moved by ep_comm, {experts.token_dispatcher.ep_dispatcher.transport} transport")
    ep_comm.shutdown()


if __name__ == "__main__":
    main()
