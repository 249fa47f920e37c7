"""Wrong arguments and configurations: the error everywhere within seconds, and the next good call works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ep_comm
from ep_comm import errors
from tests.harness import Caught, expect_error, run_ranks

FIELDS: dict[str, Any] = {
    "num_experts": 4,
    "top_k": 2,
    "hidden_size": 32,
    "max_tokens_per_rank": 8,
    "alignment": 1,
    "budget_rows": 32,
    "pair_rows": 8,
}


def make_config(**changes: Any) -> ep_comm.EPConfig:
    return ep_comm.EPConfig(**(FIELDS | changes))


def good_args(count: int = 3) -> dict[str, Any]:
    return {
        "tokens": torch.arange(32.0 * count).reshape(count, 32),
        "topk_idx": torch.tensor([[0, 3]] * count),
        "topk_weights": torch.full((count, 2), 0.5),
    }


def works(dispatcher: ep_comm.Dispatcher) -> bool:
    """A good step, with gradients, on the same dispatcher."""
    args = good_args()
    args["tokens"].requires_grad_()
    d = dispatcher.dispatch(**args)
    out = dispatcher.combine(d.tokens, d.handle, apply_weights=True)
    out.sum().backward()
    dispatcher.check()
    return torch.equal(out, args["tokens"]) and bool((args["tokens"].grad == 1).all())


@dataclass(frozen=True)
class Bad:
    """One mistake: how it changes good arguments, and what the message must hold."""

    change: Callable[[dict[str, Any]], dict[str, Any]]
    parts: tuple[str, ...]
    error: str = "ArgumentError"


def replaced(name: str, make: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda args: args | {name: make(args)}


def bad_id(value: int, dtype: torch.dtype = torch.int64) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return replaced("topk_idx", lambda _: torch.tensor([[0, 1], [2, value], [0, 1]], dtype=dtype))


BAD_DISPATCH: dict[str, Bad] = {
    "tokens is a list": Bad(replaced("tokens", lambda a: a["tokens"].tolist()), ("tokens", "Tensor")),
    "tokens is None": Bad(replaced("tokens", lambda _: None), ("tokens", "Tensor")),
    "tokens too wide": Bad(replaced("tokens", lambda _: torch.zeros(3, 33)), ("tokens", "hidden_size=32", "33")),
    "tokens of one dimension": Bad(replaced("tokens", lambda _: torch.zeros(32)), ("tokens", "[32]")),
    "tokens of three dimensions": Bad(
        replaced("tokens", lambda _: torch.zeros(1, 3, 32)), ("tokens", "[T, hidden_size=32]", "[1, 3, 32]")
    ),
    "tokens of float64": Bad(replaced("tokens", lambda a: a["tokens"].double()), ("tokens", "bfloat16")),
    "tokens of int32": Bad(replaced("tokens", lambda a: a["tokens"].int()), ("tokens", "bfloat16")),
    "tokens elsewhere": Bad(replaced("tokens", lambda a: a["tokens"].to("meta")), ("tokens", "device")),
    "too many tokens": Bad(lambda _: good_args(9), ("tokens", "9", "max_tokens_per_rank=8")),
    "topk_idx is a list": Bad(replaced("topk_idx", lambda _: [[0, 3]] * 3), ("topk_idx", "Tensor")),
    "topk_idx too wide": Bad(
        replaced("topk_idx", lambda _: torch.zeros(3, 3).long()), ("topk_idx", "top_k=2", "[3, 3]")
    ),
    "topk_idx too long": Bad(replaced("topk_idx", lambda _: torch.zeros(4, 2).long()), ("topk_idx", "[4, 2]")),
    "topk_idx of float32": Bad(replaced("topk_idx", lambda a: a["topk_idx"].float()), ("topk_idx", "int32")),
    "topk_idx of int16": Bad(replaced("topk_idx", lambda a: a["topk_idx"].short()), ("topk_idx", "int64")),
    "topk_idx elsewhere": Bad(replaced("topk_idx", lambda a: a["topk_idx"].to("meta")), ("topk_idx", "device")),
    "topk_weights is a number": Bad(replaced("topk_weights", lambda _: 1.0), ("topk_weights", "Tensor")),
    "topk_weights too short": Bad(
        replaced("topk_weights", lambda _: torch.ones(2, 2)), ("topk_weights", "[2, 2]", "top_k=2")
    ),
    "topk_weights of bfloat16": Bad(
        replaced("topk_weights", lambda a: a["topk_weights"].bfloat16()), ("topk_weights", "float32")
    ),
    "topk_weights of float64": Bad(
        replaced("topk_weights", lambda a: a["topk_weights"].double()), ("topk_weights", "float32")
    ),
    "topk_weights elsewhere": Bad(
        replaced("topk_weights", lambda a: a["topk_weights"].to("meta")), ("topk_weights", "device")
    ),
}
# In static mode these come with the step's check instead: tests/test_static_mode.py.
BAD_IDS: dict[str, Bad] = {
    "expert id above": Bad(bad_id(4), ("topk_idx", "expert id 4", "token 1", "slot 1", "-1"), "RoutingError"),
    "expert id below": Bad(bad_id(-2, torch.int32), ("topk_idx", "expert id -2", "token 1"), "RoutingError"),
    "expert id beyond 32 bits": Bad(bad_id(2**33 + 1), ("topk_idx", "token 1", "slot 1"), "RoutingError"),
}


def try_dispatch(
    rank: int, world_size: int, mode: str, cases: str, culprits: tuple[int, ...]
) -> dict[str, tuple[Caught, bool]]:
    results = {}
    with ep_comm.Dispatcher(make_config(mode=mode)) as dispatcher:
        for name, bad in globals()[cases].items():
            args = bad.change(good_args()) if rank in culprits else good_args()
            results[name] = (expect_error(dispatcher.dispatch, **args), works(dispatcher))
    return results


def check_answers(results: list[dict[str, tuple[Caught, bool]]], cases: dict[str, Bad], first: int) -> None:
    """Every rank raised the same thing about the first culprit; only a culprit may know more detail."""
    for name, bad in cases.items():
        for rank, of_rank in enumerate(results):
            caught, worked = of_rank[name]
            where = f"{name}, on rank {rank}: {caught}"
            assert caught.type == bad.error, where
            for part in (*bad.parts, f"rank {first}"):
                assert part in caught.message, where
            assert results[first][name][0].message.startswith(caught.message), where
            assert worked, f"{name}: the next call failed on rank {rank}"


@pytest.mark.parametrize("culprits", [(1,), (0, 1)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("mode, cases", [("eager", "BAD_DISPATCH"), ("eager", "BAD_IDS"), ("static", "BAD_DISPATCH")])
def test_bad_dispatch(mode: str, cases: str, culprits: tuple[int, ...]) -> None:
    results = run_ranks(try_dispatch, 2, mode, cases, culprits, timeout=40)
    check_answers(results, globals()[cases], culprits[0])


BAD_COMBINE: dict[str, Bad] = {
    "output is None": Bad(replaced("expert_output", lambda _: None), ("expert_output", "Tensor")),
    "a row too many": Bad(
        replaced("expert_output", lambda a: torch.cat([a["expert_output"], torch.zeros(1, 32)])),
        ("expert_output", "shape", ", 32]"),
    ),
    "a row too few": Bad(
        replaced("expert_output", lambda a: a["expert_output"][1:]), ("expert_output", "shape", ", 32]")
    ),
    "output too narrow": Bad(
        replaced("expert_output", lambda a: a["expert_output"][:, :31]), ("expert_output", ", 31]", ", 32]")
    ),
    "output of float64": Bad(
        replaced("expert_output", lambda a: a["expert_output"].double()), ("expert_output", "float32")
    ),
    "output elsewhere": Bad(
        replaced("expert_output", lambda a: a["expert_output"].to("meta")), ("expert_output", "device")
    ),
    "handle is None": Bad(replaced("handle", lambda _: None), ("handle", "dispatch()"), "HandleError"),
    "handle is the whole dispatched": Bad(
        replaced("handle", lambda a: (a["expert_output"], a["handle"])),
        ("handle", "dispatch()"),
        "HandleError",
    ),
    "handle of another dispatcher": Bad(
        lambda args: args | {"handle": args["foreign"]}, ("handle", "another dispatcher"), "HandleError"
    ),
}


def try_combine(rank: int, world_size: int, mode: str, culprits: tuple[int, ...]) -> dict[str, tuple[Caught, bool]]:
    results = {}
    with (
        ep_comm.Dispatcher(make_config(mode=mode)) as dispatcher,
        ep_comm.Dispatcher(make_config(mode=mode)) as other,
    ):
        for name, bad in BAD_COMBINE.items():
            d = dispatcher.dispatch(**good_args())
            args = {
                "expert_output": d.tokens,
                "handle": d.handle,
                "foreign": other.dispatch(**good_args()).handle,
            }
            if rank in culprits:
                args = bad.change(args)
            del args["foreign"]
            results[name] = (expect_error(dispatcher.combine, **args), works(dispatcher) and works(other))
    return results


@pytest.mark.parametrize(
    "mode, culprits",
    [("eager", (1,)), ("eager", (0, 1)), ("static", (0, 1))],
    ids=["eager, one rank", "eager, all ranks", "static, all ranks"],
)
def test_bad_combine(mode: str, culprits: tuple[int, ...]) -> None:
    results = run_ranks(try_combine, 2, mode, culprits, timeout=40)
    if mode == "eager":
        check_answers(results, BAD_COMBINE, culprits[0])
        return
    for rank, of_rank in enumerate(results):  # no exchange: each rank speaks of its own mistake
        for name, bad in BAD_COMBINE.items():
            caught, worked = of_rank[name]
            assert caught.type == bad.error and worked, (name, caught)
            assert all(part in caught.message for part in (*bad.parts, f"rank {rank}")), (name, caught)


def disagree(rank: int, world_size: int) -> dict[str, tuple[Caught, bool]]:
    """Arguments that are good on each rank, but not together."""
    results = {}
    with ep_comm.Dispatcher(make_config(mode="eager")) as dispatcher:
        args = good_args()
        if rank == 1:
            args["tokens"] = args["tokens"].bfloat16()
        caught = expect_error(dispatcher.dispatch, **args)
        results["token dtypes"] = (caught, works(dispatcher))

        d = dispatcher.dispatch(**good_args())
        output = d.tokens.bfloat16() if rank == 1 else d.tokens
        results["output dtypes"] = (expect_error(dispatcher.combine, output, d.handle), works(dispatcher))

        handles = [dispatcher.dispatch(**good_args()).handle for _ in range(2)]
        caught = expect_error(dispatcher.combine, torch.zeros(d.tokens.shape), handles[rank])
        results["handles"] = (caught, works(dispatcher))

        d = dispatcher.dispatch(**good_args())
        if rank == 0:
            caught = expect_error(dispatcher.dispatch, **good_args())
        else:
            caught = expect_error(dispatcher.combine, d.tokens, d.handle)
        results["calls"] = (caught, works(dispatcher))
    return results


def test_ranks_that_disagree() -> None:
    expected = {
        "token dtypes": ("ArgumentError", ("tokens", "bfloat16", "float32", "rank 1")),
        "output dtypes": ("ArgumentError", ("expert_output", "bfloat16", "float32", "rank 1")),
        "handles": ("HandleError", ("handle", "rank 0", "rank 1")),
        "calls": ("HandleError", ("dispatch", "combine", "rank 0", "rank 1")),
    }
    for results in run_ranks(disagree, 2, timeout=40):
        for name, (kind, parts) in expected.items():
            caught, worked = results[name]
            assert caught.type == kind and all(part in caught.message for part in parts), (name, caught)
            assert worked, f"{name}: the next call failed"


def use_after_close(rank: int, world_size: int, mode: str, culprits: tuple[int, ...]) -> list[Caught]:
    dispatcher = ep_comm.Dispatcher(make_config(mode=mode))
    d = dispatcher.dispatch(**good_args())
    if rank in culprits:
        dispatcher.close()
        dispatcher.close()  # closing twice is no error
    caught = [expect_error(dispatcher.dispatch, **good_args())]
    if mode == "eager" or rank in culprits:
        caught.append(expect_error(dispatcher.combine, d.tokens, d.handle))
    return caught


@pytest.mark.parametrize("culprits", [(1,), (0, 1)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_use_after_close(mode: str, culprits: tuple[int, ...]) -> None:
    for results in run_ranks(use_after_close, 2, mode, culprits, timeout=40):
        for caught in results:
            assert caught.type == "ClosedError" and "closed" in caught.message


def construct(rank: int, world_size: int, changes: list[dict[str, Any]]) -> tuple[Caught, bool]:
    caught = expect_error(lambda: ep_comm.Dispatcher(make_config(**changes[rank])))
    with ep_comm.Dispatcher(make_config()) as dispatcher:
        return caught, works(dispatcher)


@pytest.mark.parametrize(
    "changes, parts",
    [
        ([{"num_experts": 5}] * 2, ("num_experts=5", "multiple", "2")),
        ([{}, {"top_k": 3}], ("top_k", "rank 0 has 2", "rank 1 has 3")),
        ([{"hidden_size": 64}, {}], ("hidden_size", "rank 0 has 64", "rank 1 has 32")),
        ([{}, {"mode": "static"}], ("mode", "'eager'", "'static'", "rank 1")),
        ([{}, {"alignment": 16, "num_experts": 8}], ("alignment", "num_experts", "rank 1 has 16")),
        ([{}, {"dispatch_forward_dtype": "mxfp8"}], ("dispatch_forward_dtype", "'mxfp8'")),
    ],
)
def test_configurations_that_do_not_fit_the_group(changes: list[dict[str, Any]], parts: tuple[str, ...]) -> None:
    for caught, worked in run_ranks(construct, 2, changes, timeout=40):
        assert caught.type == "ConfigError" and all(part in caught.message for part in parts), caught
        assert worked


def not_a_member(rank: int, world_size: int) -> tuple[Caught, Caught]:
    only_0 = dist.new_group([0])
    outside = expect_error(lambda: ep_comm.Dispatcher(make_config(), group=only_0))
    no_config = expect_error(lambda: ep_comm.Dispatcher({"num_experts": 4}))
    return outside, no_config


def test_a_dispatcher_needs_a_config_and_a_group_it_belongs_to() -> None:
    results = run_ranks(not_a_member, 2)
    assert results[0][0].type == ""
    assert results[1][0].type == "ConfigError" and "member" in results[1][0].message
    for _, no_config in results:
        assert no_config.type == "ConfigError" and "EPConfig" in no_config.message


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"hidden_size": 48, "dispatch_forward_dtype": "mxfp8"}, ("hidden_size=48", "32")),
        ({"hidden_size": 100, "combine_backward_dtype": "mxfp8"}, ("hidden_size=100", "32")),
        ({"recv_format": "mxfp8"}, ("recv_format", "dispatch_forward_dtype")),
        ({"mode": "dynamic"}, ("mode", "'eager'", "'static'", "'dynamic'")),
        ({"dispatch_forward_dtype": "fp8"}, ("dispatch_forward_dtype", "'mxfp8'", "'fp8'")),
        ({"num_experts": 0}, ("num_experts", "0")),
        ({"top_k": -1}, ("top_k", "-1")),
        ({"hidden_size": 2.5}, ("hidden_size", "2.5")),
        ({"max_tokens_per_rank": True}, ("max_tokens_per_rank", "True")),
        ({"alignment": 0}, ("alignment", "0")),
        ({"budget_rows": 2**40}, ("budget_rows", str(2**40))),
        ({"capacity_factor": 1.5}, ("capacity_factor", "budget_rows")),
        ({"budget_rows": None, "capacity_factor": float("nan")}, ("capacity_factor", "nan")),
        ({"budget_rows": None, "capacity_factor": -1.0}, ("capacity_factor", "-1.0")),
        ({"budget_rows": 64, "max_budget_rows": 63}, ("max_budget_rows", "64", "63")),
    ],
    ids=str,
)
def test_bad_configurations(changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        make_config(**changes)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ep_comm.EPError)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_errors_can_be_caught_by_their_family() -> None:
    for kind in (errors.ConfigError, errors.ArgumentError, errors.RoutingError):
        assert issubclass(kind, errors.EPError) and issubclass(kind, ValueError)
    for kind in (errors.HandleError, errors.ClosedError, errors.PeerLostError, errors.BudgetExceededError):
        assert issubclass(kind, errors.EPError)


def test_a_single_process_raises_the_same_errors() -> None:
    with ep_comm.Dispatcher(make_config()) as dispatcher:
        for cases in (BAD_DISPATCH, BAD_IDS):
            for name, bad in cases.items():
                if name == "tokens elsewhere":
                    continue  # a single process follows its tokens' device
                caught = expect_error(dispatcher.dispatch, **bad.change(good_args()))
                assert caught.type == bad.error, (name, caught)
                assert all(part in caught.message for part in bad.parts), (name, caught)
                assert works(dispatcher), name


def static_growth(rank: int, world_size: int) -> dict[str, Caught]:
    with ep_comm.Dispatcher(make_config(mode="eager")) as eager:
        in_eager = expect_error(eager.grow, 64)
    config = make_config(mode="static", budget_rows=16, max_budget_rows=20)
    with ep_comm.Dispatcher(config) as small, ep_comm.Dispatcher(make_config(mode="static")) as large:
        loaded = expect_error(small.load_state_dict, large.state_dict())
        return {"eager": in_eager, "load": loaded, "kept": Caught("", str(small.budget_rows))}


def test_budgets_that_are_not_allowed() -> None:
    for seen in run_ranks(static_growth, 2):
        assert seen["eager"].type == "EPError" and "static" in seen["eager"].message
        assert seen["load"].type == "ConfigError" and "32" in seen["load"].message and "20" in seen["load"].message
        assert seen["kept"].message == "16"
