"""Growth of budgets: buckets, headroom, ceiling; and the configuration's arithmetic."""

from __future__ import annotations

import pytest
import torch

from ep_comm import ConfigError, Dispatcher, EPConfig, naming
from ep_comm.budget import Limit, StaticBudget, bucket_rows
from ep_comm.config import round_up
from ep_comm.layers import StaticLayers
from ep_comm.ledger import Demand


def config(**changes: object) -> EPConfig:
    values = {"num_experts": 8, "top_k": 2, "hidden_size": 32, "max_tokens_per_rank": 100, "mode": "static"}
    return EPConfig(**{**values, **changes})


@pytest.mark.parametrize("alignment", [1, 16, 48])
def test_buckets_hold_the_rows_and_repeat(alignment: int) -> None:
    buckets = [bucket_rows(rows, alignment) for rows in range(1, 5000)]
    assert buckets == sorted(buckets)
    for rows, bucket in enumerate(buckets, start=1):
        assert rows <= bucket <= round_up(rows + rows // 8 + 1, alignment) + alignment
        assert bucket % alignment == 0
    # Eight steps an octave: 5000 possible demands share under a hundred shapes.
    assert len(set(buckets)) < 100


def test_limit_grows_with_headroom_up_to_its_ceiling() -> None:
    limit = Limit(rows=100, ceiling=1000, alignment=10)
    assert limit.target(90, 0.5) == 100
    assert limit.target(101, 0.0) == 110
    assert limit.target(200, 0.1) == 230
    assert limit.target(990, 0.1) == 1000
    assert limit.target(1200, 0.1) == 1000


def test_static_budget_grows_to_the_busiest_rank() -> None:
    budget = StaticBudget(config(budget_rows=16, pair_rows=3), ep_size=2)
    demand = Demand(True, [10, 200], 40, 0, -1, [0] * 5)
    assert budget.growth_bytes(demand, 0.0) == (208 - 16) * 32 * 4
    budget.grow_to(demand, 0.0)
    assert budget.rows.rows == 208 and budget.pairs.rows == 40
    budget.note(demand)
    assert budget.rows.peak == 200 and budget.pairs.peak == 40
    other = StaticBudget(config(budget_rows=16), ep_size=2)
    other.load_state_dict(budget.state_dict(), "x")
    assert other.state_dict() == budget.state_dict()


def test_saved_budget_above_the_ceiling_is_refused() -> None:
    big = StaticBudget(config(budget_rows=160), ep_size=2).state_dict()
    small = StaticBudget(config(budget_rows=16, max_budget_rows=32), ep_size=2)
    with pytest.raises(ConfigError, match=r"layer 3: saved budget_rows=160.*32"):
        small.load_state_dict(big, "layer 3")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (None, "must be a dictionary.*NoneType"),
        (3, "must be a dictionary.*int"),
        ({"peak_rows": ...}, "lacks peak_rows"),
        ({"budget_rows": "16"}, "budget_rows must be an integer from 1.*'16'"),
        ({"budget_rows": 17}, "budget_rows=17.*multiple of 16"),
        ({"pair_rows": True}, "pair_rows must be an integer from 1.*True"),
        ({"start_rows": 0}, "start_rows must be an integer from 1.*0"),
        ({"start_pair_rows": 2.0}, "start_pair_rows"),
        ({"peak_rows": -1}, "peak_rows must be an integer from 0.*-1"),
        ({"peak_pair_rows": None}, "peak_pair_rows"),
        ({"overflows": []}, "overflows"),
    ],
)
def test_saved_budgets_are_looked_at(changes: object, named: str) -> None:
    model = torch.nn.Module()
    with Dispatcher(config(budget_rows=16)) as dispatcher, Dispatcher(config(mode="eager")) as eager:
        model.known = torch.nn.Module()
        model.known.dispatcher = dispatcher
        layers, good = StaticLayers(model, None, 0.0), dispatcher.state_dict()
        bad = changes
        if isinstance(changes, dict):
            bad = {key: value for key, value in (good | changes).items() if value is not ...}
        with pytest.raises(ConfigError, match=f"rank 0: dispatcher.*{named}"):
            dispatcher.load_state_dict(bad)
        if "multiple" not in named:
            with pytest.raises(ConfigError, match=named):
                eager.load_state_dict(bad)
            with pytest.raises(ConfigError, match=f"rank 0: other: .*{named}"):
                layers.load_state_dict({"known": good | {"budget_rows": 32}, "other": bad})
        with pytest.raises(ConfigError, match=named):
            layers.load_state_dict(dict.fromkeys(naming.named_dispatchers(model), bad))
        assert dispatcher.state_dict() == good
        dispatcher.load_state_dict({})
        layers.load_state_dict({"other": good})
        assert layers.state_dict() == {"other": good}


def test_a_budget_starts_no_higher_than_the_worst_case() -> None:
    small = config(num_experts=4, max_tokens_per_rank=128, capacity_factor=9.0)
    assert StaticBudget(small, ep_size=1).rows.rows == small.worst_case_rows(1) == 304
    assert StaticBudget(small, ep_size=2).rows.rows == small.worst_case_rows(2) == 528
    assert StaticBudget(config(num_experts=4, budget_rows=4096), ep_size=1).rows.rows == 4096  # asked for


def test_initial_budgets() -> None:
    assert config(capacity_factor=1.0).initial_budget_rows() == 208
    assert config(capacity_factor=1.1, max_tokens_per_rank=10, alignment=1).initial_budget_rows() == 22
    assert config().initial_budget_rows() == 256
    assert config(budget_rows=1).initial_budget_rows() == 16
    assert config(alignment=1, capacity_factor=1.0).initial_pair_rows(1) == 100
    assert config(alignment=1, capacity_factor=1.0).initial_pair_rows(2) == 75
    assert config(pair_rows=7).initial_pair_rows(2) == 7
    assert config(pair_rows=700).initial_pair_rows(2) == 100


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"hidden_size": -4}, "hidden_size"),
        ({"max_tokens_per_rank": "8"}, "max_tokens_per_rank"),
        ({"alignment": 0}, "alignment"),
        ({"mode": "dynamic"}, "mode.*'eager', 'static'.*'dynamic'"),
        ({"transport": "nvlink"}, "transport"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"capacity_factor": float("nan")}, "capacity_factor"),
        ({"capacity_factor": "2"}, "capacity_factor"),
        ({"capacity_factor": 1.0, "budget_rows": 5}, "capacity_factor.*budget_rows"),
        ({"budget_rows": 0}, "budget_rows"),
        ({"budget_rows": 64, "max_budget_rows": 32}, "max_budget_rows.*64.*32"),
        ({"hidden_size": 48, "dispatch_forward_dtype": "mxfp8"}, "hidden_size.*32.*48"),
        ({"hidden_size": 48, "combine_backward_dtype": "mxfp8"}, "hidden_size.*32.*48"),
        ({"recv_format": "mxfp8"}, "recv_format.*dispatch_forward_dtype"),
        ({"scale_rounding": "up"}, "scale_rounding"),
        ({"num_sms": 0}, "num_sms"),
        ({"zero_tail": 1}, "zero_tail"),
        ({"overflow": "ignore"}, "overflow"),
        ({"alignment": 2**17}, "alignment.*65536"),
        ({"capacity_factor": 1e300}, "capacity_factor.*rows"),
        ({"budget_rows": 2**31 - 1}, "budget_rows.*rows"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
    ],
)
def test_bad_configurations_name_the_field(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        config(**changes)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("rows", [-5, 1.5, "x", True])
def test_grow_takes_whole_numbers(rows: object) -> None:
    with Dispatcher(config()) as dispatcher, pytest.raises(ConfigError, match="rows must be an integer"):
        dispatcher.grow(rows)
