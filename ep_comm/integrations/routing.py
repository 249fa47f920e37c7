"""Record which experts the routers of a step chose, and make them choose the same again.

    rollout    logits ─▶ top-k ─▶ experts 3 1      recorded
    training   logits ─▶ top-k ─▶ experts 3 1      although 3 2 would win now; the weights of 3 and 1 are those of
                                                   the present logits, with their gradients

Works for every router that chooses with ``torch.topk``, that of :class:`ep_comm.moe.MoELayer` and those of
Transformers among them, by answering that call: the router's own normalising and scaling go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ArgumentError, ConfigError, EPError
from ..moe.router import in_backward

__all__ = ["RoutingReplay"]

_TOPK = (torch.topk, torch.Tensor.topk)


class RoutingReplay:
    """Keeps the choices of some routers.

    ::

        routing = RoutingReplay({"layer 0": layer.router}, num_experts=64, top_k=8)
        with routing.record():
            rollout(batch)
        with routing.replay():
            train(batch)          # the same calls, in the same order

    Outside of the two the routers choose freely. Recomputation in a backward pass gets the choice of the latest
    forward call, so with activation recomputation a micro-batch's backward pass must come before the router's next
    forward call. Choices are kept on their device, one copy for each forward call; a captured CUDA graph does
    not run this Python code, so give ``capture="never"`` to :class:`ep_comm.StepRunner`.

    Args:
        routers: modules by name. A module may be larger than the router, as long as it chooses once in each call
            (the MoE block of DeepSeek-V3 in Transformers, whose router only makes logits).
        num_experts, top_k: tell the choice of experts from other uses of top-k: ``topk(x [..., num_experts], top_k)``.

    Raises:
        ConfigError: there are no routers, or a size is out of range.
    """

    def __init__(self, routers: Mapping[str, nn.Module], *, num_experts: int, top_k: int) -> None:
        if not routers:
            raise ConfigError("routers must name at least one module, got none")
        if not 1 <= top_k <= num_experts:
            raise ConfigError(f"top_k must be from 1 to num_experts={num_experts}, got {top_k}")
        self.num_experts, self.top_k = num_experts, top_k
        self.choices: dict[str, list[Tensor]] = {name: [] for name in routers}
        """For each router the expert ids ``[..., K]`` of every forward call."""
        self._calls = dict.fromkeys(routers, 0)
        self._replaying: bool | None = None
        # A module may have a forward of its own already, which then comes back in close().
        self._before = [(router, router.__dict__.get("forward")) for router in routers.values()]
        for name, router in routers.items():
            router.forward = self._wrap(name, router.forward)

    @contextmanager
    def record(self) -> Iterator[RoutingReplay]:
        """Forget earlier choices and keep those made inside."""
        with self._during(replaying=False):
            for choices in self.choices.values():
                choices.clear()
            yield self

    @contextmanager
    def replay(self) -> Iterator[RoutingReplay]:
        """Make the routers choose what was recorded, call by call.

        Inside, a router raises :class:`ep_comm.EPError` if it is called more often than when recording, and
        :class:`ep_comm.ArgumentError` if it has another number of tokens.
        """
        with self._during(replaying=True):
            yield self

    def close(self) -> None:
        """Give the routers their own forward back. May be called twice."""
        for router, forward in self._before:
            del router.forward
            if forward is not None:
                router.forward = forward
        self._before.clear()

    def state_dict(self) -> dict[str, list[Tensor]]:
        """The choices, to be saved or sent to another process."""
        return {name: list(choices) for name, choices in self.choices.items()}

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        """Take over :meth:`state_dict` of a model with the same routers.

        Raises:
            ConfigError: the names differ.
        """
        if state.keys() != self.choices.keys():
            raise ConfigError(f"the choices are of the routers {sorted(state)}, here are {sorted(self.choices)}")
        for name, choices in state.items():
            self.choices[name][:] = choices

    @contextmanager
    def _during(self, *, replaying: bool) -> Iterator[None]:
        if self._replaying is not None:
            raise EPError("record() and replay() cannot be nested")
        self._replaying = replaying
        self._calls = dict.fromkeys(self._calls, 0)
        try:
            yield
        finally:
            self._replaying = None

    def _wrap(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def with_choices(*args: Any, **kwargs: Any) -> Any:
            if self._replaying is None:
                return forward(*args, **kwargs)
            with _Answer(self, name) as answer:
                result = forward(*args, **kwargs)
            if not answer.asked:
                raise EPError(
                    f"router {name}: no torch.topk over {self.num_experts} experts with k={self.top_k} in its forward"
                )
            return result

        return with_choices

    def _choice(self, name: str, scores: Tensor, choose: Callable[[], Tensor]) -> Tensor:
        """Expert ids for one call; ``choose`` gives those that the scores ask for."""
        recorded = self.choices[name]
        again = in_backward()
        if not again:
            self._calls[name] += 1
        call = self._calls[name] - 1
        if not self._replaying and not again:
            recorded.append(choose().detach().clone())
            return recorded[-1]
        if not 0 <= call < len(recorded):
            raise EPError(f"router {name}: call {call + 1} cannot be replayed, {len(recorded)} were recorded")
        choice = recorded[call].to(scores.device)
        if choice.shape != (*scores.shape[:-1], self.top_k):
            raise ArgumentError(
                f"router {name}: call {call + 1} has scores of shape {list(scores.shape)}, but the recorded choice has "
                f"shape {list(choice.shape)}: replay needs the tokens of the recording"
            )
        return choice


class _Answer(TorchFunctionMode):
    """Answers the call of ``torch.topk`` that chooses experts."""

    def __init__(self, owner: RoutingReplay, name: str) -> None:
        super().__init__()
        self.owner, self.name, self.asked = owner, name, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        if self.asked or k != self.owner.top_k or scores.shape[-1] != self.owner.num_experts:
            return func(*args, **kwargs)
        self.asked = True
        choice = self.owner._choice(self.name, scores, lambda: func(*args, **kwargs).indices)
        return torch.return_types.topk((scores.gather(-1, choice), choice))
