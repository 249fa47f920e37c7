"""Every transport, mode and wire format against the reference, in all four directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EPConfig
from ..dispatcher import Dispatcher
from ..distributed import Env
from ..errors import ConfigError
from ..transport.hosts import host_name, ranks_by_host
from .findings import ranges
from .reference import Expected, Inputs, expected, make_inputs

__all__ = ["DIRECTIONS", "Case", "CaseResult", "Offer", "cases", "open_transports", "run_case", "shorten_reason"]

DIRECTIONS = ("dispatch forward", "dispatch backward", "combine forward", "combine backward")
_HIDDEN_SIZE = 256
_LOCAL_EXPERTS = 2
_SUMS_BY_HOST = ("hierarchical",)
_ORDER_FREE = 1e-5  # the sum of a dot product may be taken in any order


@dataclass(frozen=True)
class Case:
    """One dispatcher and one set of inputs."""

    transport: str
    mode: str
    wire: str
    dtype: str = "bfloat16"
    apply_weights: bool = True
    alignment: int = 16
    seed: int = 0


@dataclass
class CaseResult:
    """What one rank found: for every direction that is wrong, what is wrong."""

    case: Case
    rank: int
    wrong: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def cases(transport: str, *, full: bool) -> Iterator[Case]:
    """The cases of one transport: both modes and wire formats; with ``full`` more dtypes, alignments and inputs."""
    for number, (mode, wire) in enumerate(product(("eager", "static"), ("bf16", "mxfp8"))):
        for apply_weights in (True, False):
            yield Case(transport, mode, wire, apply_weights=apply_weights, seed=2 * number + apply_weights)
    if full:
        for number, (mode, dtype, alignment) in enumerate(
            product(("eager", "static"), ("float32", "float16", "bfloat16"), (1, 128))
        ):
            wire = "mxfp8" if dtype == "bfloat16" else "bf16"
            yield Case(transport, mode, wire, dtype, alignment=alignment, seed=100 + number)


@dataclass(frozen=True)
class Offer:
    """What there is to check.

    Attributes:
        problems: for every transport that :class:`EPConfig` knows why it cannot be used here, empty where it can.
        auto: the transport that ``"auto"`` chooses.
        hosts: the ranks of every host.
    """

    problems: dict[str, str]
    auto: str
    hosts: list[list[int]]


def open_transports(env: Env) -> Offer:
    """Which transports serve these ranks. Collective."""
    names = [""] * env.world_size
    dist.all_gather_object(names, host_name(), group=env.group)
    problems: dict[str, str] = {}
    for name in get_args(get_type_hints(EPConfig)["transport"]):
        if name == "auto":
            continue
        try:
            with Dispatcher(_config(env, Case(name, "static", "bf16"), tokens=8), env.group) as dispatcher:
                problems[name] = "" if dispatcher.transport in (name, "local") else f"became {dispatcher.transport}"
        except ConfigError as error:
            problems[name] = shorten_reason(str(error))
    with Dispatcher(_config(env, Case("auto", "static", "bf16"), tokens=8), env.group) as dispatcher:
        return Offer(problems, dispatcher.transport, ranks_by_host(names))


def shorten_reason(message: str) -> str:
    """Why a transport cannot serve, without the frame, and with ranks of the same trouble named together."""
    message = message.split("cannot serve this group: ")[-1]
    by_reason: dict[str, list[int]] = {}
    others = []
    for part in message.split("; "):
        match = re.fullmatch(r"rank (\d+): (.*)", part)
        if match:
            by_reason.setdefault(match.group(2), []).append(int(match.group(1)))
        elif not part.startswith("use '"):
            others.append(part)
    named = [f"{reason} (rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)})" for reason, ranks in by_reason.items()]
    return "; ".join(named + others)


def run_case(
    env: Env, case: Case, hosts: list[list[int]], prepare: Callable[[Dispatcher], None] | None = None
) -> CaseResult:
    """Dispatch, combine and all gradients on this rank, compared bit for bit. Collective.

    Args:
        hosts: the ranks of every host; one transport sums inside them first.
    """
    dtype = getattr(torch, case.dtype)
    tokens = max(8, min(64, 4096 // env.world_size))
    config = _config(env, case, tokens)
    inputs = make_inputs(env.world_size, config.num_experts, config.top_k, _HIDDEN_SIZE, tokens, dtype, case.seed)
    want = expected(
        inputs,
        env.rank,
        alignment=case.alignment,
        mxfp8=case.wire == "mxfp8",
        apply_weights=case.apply_weights,
        hosts=hosts if case.transport in _SUMS_BY_HOST else None,
    )
    with Dispatcher(config, env.group, name=f"{case.transport} {case.mode} {case.wire}") as dispatcher:
        if prepare is not None:
            prepare(dispatcher)
        got = _run(dispatcher, env, inputs, want, case.apply_weights)
    result = CaseResult(case, env.rank)
    for direction, name, value, wanted in got:
        problem = _difference(name, value.cpu(), wanted, want, dispatcher.num_local_experts * env.rank)
        if problem:
            result.wrong.setdefault(direction, problem)
    return result


def _config(env: Env, case: Case, tokens: int) -> EPConfig:
    num_experts = _LOCAL_EXPERTS * env.world_size
    config = EPConfig(
        num_experts=num_experts,
        top_k=min(4, num_experts),
        hidden_size=_HIDDEN_SIZE,
        max_tokens_per_rank=tokens,
        mode=case.mode,
        alignment=case.alignment,
        dispatch_forward_dtype=case.wire,
        combine_backward_dtype=case.wire,
        transport=case.transport,
        pair_rows=tokens,
    )
    if case.mode == "eager":
        return config
    return EPConfig(**{**config.to_dict(), "budget_rows": config.worst_case_rows(env.world_size)})


def _run(
    dispatcher: Dispatcher, env: Env, inputs: Inputs, want: Expected, apply_weights: bool
) -> list[tuple[str, str, Tensor, Tensor]]:
    """(direction, what, got, expected) of everything that comes out; the tail of a static buffer must be zero."""
    rank, count, device = env.rank, inputs.num_tokens[env.rank], env.device
    tokens = inputs.tokens[rank, :count].to(device).requires_grad_()
    weights = inputs.topk_weights[rank, :count].to(device).requires_grad_()
    d = dispatcher.dispatch(tokens, inputs.topk_idx[rank, :count].to(device), weights)
    rows = d.tokens.shape[0]

    def by_row(values: Tensor) -> Tensor:
        # Padding and tail hold NaN: they must not be read.
        return want.layout.fill(values, rows, torch.nan).to(device)

    expert_output = by_row(inputs.outputs).requires_grad_()
    out = dispatcher.combine(expert_output, d.handle, apply_weights=apply_weights)
    wanted = [expert_output, weights] if apply_weights else [expert_output]
    grads = torch.autograd.grad(out, wanted, inputs.grad_out[rank, :count].to(device), retain_graph=True)
    grad_tokens, grad_weights = torch.autograd.grad(
        [d.tokens, d.weights], [tokens, weights], [by_row(inputs.grad_rows), by_row(inputs.grad_row_weights)]
    )
    forth, forth_back, back, back_back = DIRECTIONS
    results = [
        (forth, "tokens per expert", d.tokens_per_expert, want.layout.tokens_per_expert),
        (forth, "expert offsets", d.expert_offsets, want.layout.expert_offsets),
        (forth, "rows", d.tokens.detach(), _with_tail(want.rows, rows)),
        (forth, "weights", d.weights.detach(), _with_tail(want.weights, rows)),
        (forth_back, "gradient of tokens", grad_tokens, want.grad_tokens),
        (forth_back, "gradient of weights", grad_weights, want.grad_weights),
        (back, "sums", out.detach(), want.out),
        (back_back, "gradient of rows", grads[0], _with_tail(want.grad_outputs, rows)),
    ]
    if apply_weights:
        off = (grads[1].cpu().double() - want.grad_dots).abs() > _ORDER_FREE * want.grad_dots_scale
        results.append((back_back, "gradient of weights", off, torch.zeros_like(off)))
    return results


def _with_tail(wanted: Tensor, rows: int) -> Tensor:
    return torch.cat([wanted, wanted.new_zeros(rows - wanted.shape[0], *wanted.shape[1:])])


def _difference(name: str, got: Tensor, wanted: Tensor, want: Expected, first_expert: int) -> str:
    """Where and how a result differs in any bit, or nothing."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{name}: {got.dtype} {list(got.shape)} instead of {wanted.dtype} {list(wanted.shape)}"
    if got.numel() == 0:
        return ""
    differs = (_bits(got) != _bits(wanted)).reshape(got.shape[0], -1)
    bad = differs.any(1).nonzero().flatten()
    if bad.numel() == 0:
        return ""
    row, column = int(bad[0]), int(differs[bad[0]].nonzero()[0])
    values = f"{got.reshape(len(got), -1)[row, column].item():g} instead of "
    values += f"{wanted.reshape(len(wanted), -1)[row, column].item():g}"
    by_rows = name in ("rows", "weights", "gradient of rows")
    where = f"{name}: {bad.numel()} of {len(got)} {'rows' if by_rows else 'entries'} differ, first number {row}"
    if by_rows and row < len(want.layout.source) and want.layout.source[row, 0] >= 0:
        source, token, slot = want.layout.source[row].tolist()
        expert = first_expert + int((want.layout.expert_offsets[1:] <= row).sum())
        where += f" (expert {expert}, from rank {source}, token {token}, slot {slot})"
        sources = sorted({int(want.layout.source[r, 0]) for r in bad.tolist() if r < len(want.layout.source)} - {-1})
        if len(sources) == 1 and bad.numel() > 1:
            where += f", all from rank {source}"
    return f"{where}, column {column}: {values}"


def _bits(values: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(kinds[values.element_size()])
