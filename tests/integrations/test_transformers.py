"""Models of Transformers on two ranks give the logits, loss and gradients that they give in one process."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_comm.extras import install_hint
from tests.harness import run_ranks
from tests.integrations import hf_models

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def _missing() -> str:
    """Why these tests cannot run here; empty if they can."""
    for name in ("transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            return f"needs {name}: {install_hint('transformers')}"
    try:
        import ep_comm.integrations.transformers  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


_WHY = _missing()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY)


@pytest.fixture(scope="module")
def saved() -> Iterator[Any]:
    """Saves a model when it is first asked for, and gives its folder."""
    root = Path(tempfile.mkdtemp(prefix="ep_comm_hf_"))

    def get(name: str, **changes: Any) -> str:
        path = root / "-".join([name, *map(str, changes.values())])
        if not path.exists():
            hf_models.build(name, **changes).save_pretrained(path)
        return str(path)

    yield get
    shutil.rmtree(root)


def check(results: list[Any], expected: Any) -> None:
    """Logits of each rank, the mean loss, and every gradient."""
    logits, loss, grads = expected
    for rank, (got, _, _) in enumerate(results):
        torch.testing.assert_close(got, logits[rank % len(logits)], **TOLERANCE)
    assert sum(result[1] for result in results) / len(results) == pytest.approx(loss, rel=1e-5)
    assert results[0][2].keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(results[0][2][name], grad, **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("layout", ["shared", "distinct"])
@pytest.mark.parametrize("name", list(hf_models.CONFIGS))
def test_training_gives_what_one_process_gives(name: str, layout: str, saved: Any) -> None:
    path = saved(name)
    batches = [hf_models.batch(index) for index in range(1 if layout == "shared" else 2)]
    expected = hf_models.reference(path, batches)
    # A budget of the worst case: in static mode unused rows are then certain, and nothing overflows.
    fields = {"ep_comm": {}, "ep_comm_static": {"capacity_factor": 4.0}, "all_to_all": {}}
    for results in zip(*run_ranks(train_with_each, 2, path, layout, fields, timeout=150), strict=True):
        check(list(results), expected)


def train_with_each(rank: int, world_size: int, path: str, layout: str, fields: dict[str, Any]) -> list[Any]:
    return [
        hf_models.train_once(rank, world_size, path, layout, implementation, fields[implementation])
        for implementation in fields
    ]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_parallelize_gives_what_one_process_gives(name: str, saved: Any) -> None:
    path = saved(name)
    expected = hf_models.reference(path, [hf_models.batch(0), hf_models.batch(1)])
    for results in zip(*run_ranks(train_parallelized, 2, path), strict=True):
        check(list(results), expected)


def train_parallelized(rank: int, world_size: int, path: str) -> list[tuple[Tensor, float, dict[str, Tensor]]]:
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from ep_comm import EPConfig
    from ep_comm.integrations.transformers import parallelize

    out = []
    for implementation in ("grouped_mm", "eager"):
        for mode in ("eager", "static"):
            model = AutoModelForCausalLM.from_pretrained(path, experts_implementation=implementation)
            sizes = (hf_models.EXPERTS, hf_models.TOP_K, hf_models.HIDDEN)
            config = EPConfig(*sizes, max_tokens_per_rank=20, mode=mode, capacity_factor=4.0)
            parallelize(model, dist.group.WORLD, config)
            result = model(input_ids=hf_models.batch(rank), labels=hf_models.batch(rank), use_cache=False)
            result.loss.backward()
            grads = {}
            for key, parameter in model.named_parameters():
                grad = parameter.grad / world_size
                if getattr(parameter, "ep_expert", False):
                    parts = [torch.empty_like(grad) for _ in range(world_size)]
                    dist.all_gather(parts, grad)
                    grads[key] = torch.cat(parts)
                else:
                    dist.all_reduce(grad)
                    grads[key] = grad
            out.append((result.logits.detach(), float(result.loss.detach()), grads))
    return out


def test_generation(saved: Any) -> None:
    """Prompts of different lengths, longer than any before, and single tokens: the eager limit grows."""
    path = saved("qwen3_moe")
    expected = generate_with(None, path)
    assert len(set(map(len, expected))) > 1
    for got in run_ranks(generate, 2, path):
        assert got == expected


def generate_with(model: Any, path: str) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = model or AutoModelForCausalLM.from_pretrained(path)
    return [
        model.generate(hf_models.batch(7, length, 1), max_new_tokens=4, min_new_tokens=4, do_sample=False)[0].tolist()
        for length in (1, 3, 20)
    ]


def generate(rank: int, world_size: int, path: str) -> list[list[int]]:
    return generate_with(hf_models.load(path, "shared", "ep_comm"), path)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_overflow_is_replayed(experts: str, saved: Any) -> None:
    """Static mode from a budget that is far too small trains as eager mode does.

    To the bit with the model's own loop over its experts; on a CPU the last bit of what grouped_mm computes
    depends on the size of the buffer that holds the rows.
    """
    results = run_ranks(train_steps, 2, saved("mixtral"), experts)
    tolerance = {"rtol": 0, "atol": 0 if experts == "eager" else 1e-6}
    for (expected, _, _), (weights, replays, names) in results:
        assert 1 <= replays < 4
        assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, **tolerance, msg=lambda text, n=name: f"{n}: {text}")


def train_steps(rank: int, world_size: int, path: str, experts: str) -> list[tuple[dict[str, Tensor], int, list[str]]]:
    from ep_comm import StepRunner

    out = []
    for implementation, fields in (("ep_comm", {}), ("ep_comm_static", {"budget_rows": 2, "pair_rows": 1})):
        model = hf_models.load(path, "distinct", implementation, experts=experts, **fields).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(ids: Tensor, model: Any = model) -> Tensor:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss.detach()

        runner = StepRunner(step, model=model, optimizer=optimizer)
        for index in range(4):
            runner(hf_models.batch(2 * index + rank))
        weights = {name: hf_models.whole(p.detach()) for name, p in model.named_parameters()}
        out.append((weights, runner.replays, [budget.name for budget in runner.budgets()]))
    return out


def test_mxfp8_signal_to_noise(saved: Any) -> None:
    """28 dB on logits, 25 dB on gradients, and not the bits of full precision.

    One layer: a second router would send a few of the rounded tokens to other experts.
    """
    path = saved("mixtral", num_hidden_layers=1)
    logits, _, grads = hf_models.reference(path, [hf_models.batch(0), hf_models.batch(1)])
    fields = {"dispatch_forward_dtype": "mxfp8", "combine_backward_dtype": "mxfp8"}
    results = run_ranks(hf_models.train_once, 2, path, "distinct", "ep_comm", fields)
    for rank, (got, _, _) in enumerate(results):
        assert 28 <= decibels(got, logits[rank]) < 60
    both = [torch.cat([tensors[name].flatten() for name in grads]) for tensors in (results[0][2], grads)]
    assert decibels(*both) >= 25


def test_bf16_gives_what_their_own_path_gives(saved: Any) -> None:
    """One layer, so that both route alike; the distance left is that of BF16 rounding, 2**-9 or 54 dB a value."""
    theirs, ours = zip(*run_ranks(train_in_bf16, 2, saved("mixtral", num_hidden_layers=1)), strict=True)
    for rank in range(2):
        assert decibels(ours[rank][0].float(), theirs[rank][0].float()) > 40
    both = [torch.cat([grad.float().flatten() for grad in result[0][2].values()]) for result in (ours, theirs)]
    assert decibels(*both) > 40


def train_in_bf16(rank: int, world_size: int, path: str) -> list[Any]:
    fields = {"dtype": torch.bfloat16}
    return [
        hf_models.train_once(rank, world_size, path, "distinct", implementation, fields)
        for implementation in ("all_to_all", "ep_comm")
    ]


def decibels(got: Tensor, expected: Tensor) -> float:
    return float(20 * torch.log10(expected.norm() / (got - expected).norm()))


@pytest.mark.parametrize(
    ("name", "router"), [("mixtral", "mlp.gate"), ("gpt_oss", "mlp.router"), ("deepseek_v3", "mlp")]
)
def test_routing_is_replayed(name: str, router: str, saved: Any) -> None:
    from ep_comm.integrations.routing import RoutingReplay

    model = hf_models.build(name)
    layer = model.model.layers[1]
    routing = RoutingReplay({router: layer.get_submodule(router)}, num_experts=hf_models.EXPERTS, top_k=hf_models.TOP_K)
    seen: list[Tensor] = []
    layer.mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone()))
    with torch.no_grad():
        with routing.record():
            model(input_ids=hf_models.batch(0))
        for parameter in layer.mlp.get_submodule("router" if name == "gpt_oss" else "gate").parameters():
            parameter.neg_()
        model(input_ids=hf_models.batch(0))
        with routing.replay():
            model(input_ids=hf_models.batch(0))
    recorded, free, replayed = seen
    assert torch.equal(recorded, replayed)
    assert not torch.equal(recorded, free)


def test_mistakes_are_named(saved: Any) -> None:
    from ep_comm import ArgumentError, ConfigError, EPConfig
    from ep_comm.integrations.transformers import parallelize, register

    with pytest.raises(ConfigError, match="num_experts cannot be given"):
        register(num_experts=4)
    with pytest.raises(ConfigError, match="capacity"):
        register(capacity=4)
    with pytest.raises(ConfigError, match="alignment must be an integer"):
        register(alignment=0)
    with pytest.raises(ConfigError, match="Linear has no module"):
        parallelize(torch.nn.Linear(1, 1), None)
    model = hf_models.build("mixtral")
    with pytest.raises(ConfigError, match="config.num_experts must be 4, the experts of model.layers.0.mlp.experts"):
        parallelize(model, None, EPConfig(num_experts=8, top_k=2, hidden_size=32, max_tokens_per_rank=8))
    parallelize(model, None, EPConfig(num_experts=4, top_k=2, hidden_size=32, max_tokens_per_rank=8, mode="static"))
    with pytest.raises(ConfigError, match="spread over ranks already"):
        parallelize(model, None)
    with pytest.raises(ArgumentError, match="max_tokens_per_rank"):
        model(input_ids=hf_models.batch(0))
