"""Tiny MoE models of Transformers with random weights, and what the tests do with them on a rank.

Imports Transformers only inside functions: the tests skip where it is missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCAB, HIDDEN, EXPERTS, TOP_K, LENGTH = 64, 32, 4, 2, 7

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 40, "head_dim": 8, "norm_topk_prob": True},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 40,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "olmoe": {"num_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 4},
}


def build(name: str, **changes: Any) -> Any:
    """The model with every parameter drawn at random, biases too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**_COMMON, **CONFIGS[name], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that a wrong expert or weight shows far above the tolerance.
            parameter.copy_(torch.randn(parameter.shape) * 0.15 + (parameter.dim() == 1))
    return model.eval()


def batch(index: int, length: int = LENGTH, sequences: int = 2) -> Tensor:
    """Token ids ``[sequences, length]``."""
    return torch.randint(3, VOCAB, (sequences, length), generator=torch.Generator().manual_seed(50 + index))


def whole(tensor: Tensor) -> Tensor:
    """A parameter's gradient in full, wherever its shards are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def reference(path: str, batches: list[Tensor]) -> tuple[list[Tensor], float, dict[str, Tensor]]:
    """Logits, mean loss and its gradients of the model at ``path`` in this one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    logits, total = [], torch.zeros(())
    for ids in batches:
        out = model(input_ids=ids, labels=ids, use_cache=False)
        logits.append(out.logits.detach())
        total = total + out.loss / len(batches)
    total.backward()
    return logits, float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distributed_config(layout: str, implementation: str) -> Any:
    """Layout "shared": both ranks hold one batch (EP = TP); "distinct": one batch a rank."""
    from transformers.distributed import DistributedConfig

    sizes = {"tp_size": 2} if layout == "shared" else {"fsdp_size": 2}
    return DistributedConfig(ep_size=2, ep_implementation=implementation, **sizes)


def load(
    path: str,
    layout: str,
    implementation: str,
    *,
    experts: str | None = None,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Any:
    """What a user writes; ``experts`` is Transformers' ``experts_implementation``."""
    from transformers import AutoModelForCausalLM

    from ep_comm.integrations.transformers import register

    register(**fields)
    more = {} if experts is None else {"experts_implementation": experts}
    return AutoModelForCausalLM.from_pretrained(
        path, distributed_config=distributed_config(layout, implementation), dtype=dtype, **more
    )


def train_once(
    rank: int, world_size: int, path: str, layout: str, implementation: str, fields: dict[str, Any]
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits of this rank, its loss and all gradients in full."""
    model = load(path, layout, implementation, **fields)
    ids = batch(rank if layout == "distinct" else 0)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), float(out.loss.detach()), grads
