"""Train a small GPT of Megatron-Core with its experts spread over the ranks, by ep_comm.

    torchrun --nproc-per-node 2 scripts/examples/megatron_train.py            # eager mode
    torchrun --nproc-per-node 2 scripts/examples/megatron_train.py --static   # fixed buffers, overflow and replay

The model has random weights and learns to continue 0 1 2 3 ... Only the call of ``use`` is about ep_comm, and the step
runner, which static mode needs.
"""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

import ep_comm
from ep_comm.integrations import megatron

EXPERTS, VOCABULARY, SEQUENCE, BATCH = 8, 128, 32, 4


def work_without_gpu() -> None:
    """Megatron-Core asks CUDA for a device and for random states. This lets the example run on any machine."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


def make_model(env: ep_comm.Env, static: bool) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        expert_model_parallel_size=env.world_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
    )
    settings = dict(dispatch_forward_dtype="mxfp8", combine_backward_dtype="mxfp8")
    if static:
        settings |= dict(mode="static", seq_length=SEQUENCE, micro_batch_size=BATCH, capacity_factor=1.1)
    megatron.use(config, **settings)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE).to(env.device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    env = ep_comm.init_distributed()
    if env.device.type == "cpu":
        work_without_gpu()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # release 0.16.1 forgets it where Transformer Engine is missing
    parallel_state.initialize_model_parallel(expert_model_parallel_size=env.world_size)
    if env.device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    model = make_model(env, options.static)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = torch.arange(SEQUENCE, device=env.device).expand(BATCH, -1)
    later = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=env.device).triu(1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids[:, :-1].contiguous(), positions, later, labels=ids[:, 1:].contiguous()).mean()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                if getattr(parameter, "allreduce", True):  # Megatron's mark: False for experts
                    dist.all_reduce(parameter.grad)
                parameter.grad /= env.world_size
        return loss.detach()

    state = megatron.MegatronStepState()
    runner = ep_comm.StepRunner(step, model=model, optimizer=optimizer, extra_state=[state])
    for number in range(options.steps):
        starts = torch.randint(0, 128, (BATCH, 1), generator=torch.Generator().manual_seed(number * 97 + env.rank))
        loss = runner(((starts + torch.arange(SEQUENCE + 1)) % VOCABULARY).to(env.device))
        if env.rank == 0 and number % 5 == 4:
            print(f"step {number + 1:3d}   loss {loss.item():.3f}   steps replayed {runner.replays}", flush=True)
    if env.rank == 0:
        for budget in runner.budgets():
            print(f"{budget.name}: {budget.start_rows} rows at the start, {budget.budget_rows} now")
    parallel_state.destroy_model_parallel()
    ep_comm.shutdown()


if __name__ == "__main__":
    main()
