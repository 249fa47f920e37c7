"""Train a small Mixtral of Hugging Face Transformers with its experts spread over the ranks, by ep_comm.

    torchrun --nproc-per-node 2 scripts/examples/transformers_train.py            # eager mode
    torchrun --nproc-per-node 2 scripts/examples/transformers_train.py --static   # fixed buffers, overflow and replay

The model has random weights and learns to continue 0 1 2 3 ...; give your own path to from_pretrained instead.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig

import ep_comm
from ep_comm.integrations.transformers import register


def save_random_model(env: ep_comm.Env) -> str:
    """A folder with the model, the same on all ranks."""
    folder = [tempfile.mkdtemp() if env.rank == 0 else ""]
    if env.rank == 0:
        sizes = dict(hidden_size=64, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2, vocab_size=128)
        heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    return folder[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    env = ep_comm.init_distributed()
    torch.manual_seed(0)
    path = save_random_model(env)

    register(capacity_factor=1.1, dispatch_forward_dtype="mxfp8", combine_backward_dtype="mxfp8")
    parallel = DistributedConfig(
        fsdp_size=env.world_size,
        ep_size=env.world_size,
        ep_implementation="ep_comm_static" if options.static else "ep_comm",
    )
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=parallel)
    dist.barrier()  # all ranks have read it
    if env.rank == 0:
        shutil.rmtree(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    runner = ep_comm.StepRunner(step, model=model, optimizer=optimizer)
    for number in range(options.steps):
        starts = torch.randint(0, 128, (4, 1), generator=torch.Generator().manual_seed(number * 97 + env.rank))
        loss = runner(((starts + torch.arange(32)) % 128).to(env.device))
        if env.rank == 0 and number % 5 == 4:
            print(f"step {number + 1:3d}   loss {loss.item():.3f}   steps replayed {runner.replays}", flush=True)
    if env.rank == 0:
        for budget in runner.budgets():
            print(f"{budget.name}: {budget.start_rows} rows at the start, {budget.budget_rows} now")
    ep_comm.shutdown()


if __name__ == "__main__":
    main()
