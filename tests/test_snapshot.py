"""What StateSnapshot keeps beside the model, and what it says about values it cannot keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ep_comm import ConfigError
from ep_comm.snapshot import StateSnapshot


class OnlyLoads:
    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    "bad, message",
    [
        (3, "iterable of tensors.*got 3 of type int"),
        (None, "got None of type NoneType"),
        (torch.tensor(1.5), r"got tensor\(1.5000\) of type Tensor"),
        (nn.BatchNorm1d(2), "got a value of type BatchNorm1d"),
        ([torch.zeros(2), 7], "got 7 of type int at place 1"),
        ("ab", "got 'a' of type str at place 0"),
        ([OnlyLoads()], "got .*type OnlyLoads at place 0"),
        ([list(range(1000))], "got a value of type list at place 0"),
    ],
)
def test_extra_state_that_cannot_be_kept(bad: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^extra_state must .*{message}"):
        StateSnapshot(nn.Linear(2, 2), (), bad)


def test_extra_state_of_every_kind_comes_back() -> None:
    tensor, generator, module = torch.zeros(2), torch.Generator().manual_seed(3), nn.Linear(2, 1)
    snapshot = StateSnapshot(nn.Linear(2, 2), (), iter((tensor, generator, module)))
    state, weight = snapshot.take(), module.weight.detach().clone()
    drawn = torch.rand(3, generator=generator)
    tensor.fill_(1.0)
    nn.init.ones_(module.weight)
    snapshot.restore(state)
    assert tensor.tolist() == [0.0, 0.0] and torch.equal(module.weight, weight)
    assert torch.equal(torch.rand(3, generator=generator), drawn)
