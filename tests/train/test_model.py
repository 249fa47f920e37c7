"""The model without communication: shapes, causality, options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ep_comm.errors import ConfigError
from ep_comm.train.model import ByteMoEModel, ModelConfig


def make_model(**options: Any) -> ByteMoEModel:
    config = ModelConfig(
        **{"hidden_size": 16, "layers": 2, "heads": 2, "ffn_size": 8, "sequence_length": 12, **options}
    )
    return ByteMoEModel(config, lambda _: nn.Linear(16, 16), seed=3)


def test_logits_have_one_entry_a_byte_value() -> None:
    logits = make_model()(torch.randint(256, (3, 12)))
    assert logits.shape == (3, 12, 256) and logits.dtype == torch.float32


def test_a_position_sees_itself_and_what_is_before_it_only() -> None:
    model = make_model(dropout=0.0).eval()
    ids = torch.randint(256, (1, 12))
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert all(not torch.equal(before[:, at], after[:, at]) for at in range(7, 12))


def test_positions_matter() -> None:
    # With one layer and no positions the last byte would see the others as a mere bag of bytes.
    model = make_model(dropout=0.0, layers=1).eval()
    logits = model(torch.tensor([[65, 66, 65, 66, 67]]))
    swapped = model(torch.tensor([[66, 65, 65, 66, 67]]))
    assert not torch.allclose(logits[:, -1], swapped[:, -1], atol=1e-6)


def test_untrained_loss_is_that_of_guessing() -> None:
    ids = torch.randint(256, (4, 12), generator=torch.Generator().manual_seed(0))
    assert abs(float(make_model().loss(ids, ids.roll(-1)).detach()) - 5.545) < 0.1  # ln 256


def test_all_parameters_get_gradients() -> None:
    model = make_model(dense_first=True)
    ids = torch.randint(256, (2, 12))
    model.loss(ids, ids).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    first = make_model().state_dict()
    torch.manual_seed(2)
    second = make_model().state_dict()
    shared = [name for name in first if ".ffn." not in name]
    assert shared and all(torch.equal(first[name], second[name]) for name in shared)


def test_tied_embedding_is_one_tensor() -> None:
    model = make_model(tied_embedding=True)
    assert model.head.weight is model.embedding.weight
    assert not any(name.startswith("head") for name, _ in model.named_parameters())


def test_dense_first_has_one_moe_layer_fewer() -> None:
    assert len(make_model().moe_layers()) == 2
    assert len(make_model(dense_first=True).moe_layers()) == 1


def test_fp32_logits_are_fp32_in_a_bf16_model() -> None:
    ids = torch.randint(256, (1, 12))
    dtypes = [make_model(fp32_logits=on).to(torch.bfloat16)(ids).dtype for on in (False, True)]
    assert dtypes == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 18}, "hidden_size must be a multiple of 2 \\* heads = 4, got 18"),
        ({"dropout": 1.0}, "dropout must be from 0 to below 1, got 1.0"),
        ({"layers": 0}, "layers must be an integer from 1, got 0"),
        ({"layers": 1, "dense_first": True}, "dense_first needs layers from 2 on, got layers=1"),
    ],
)
def test_impossible_shapes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_model(**options)
