"""What the dispatchers of a model are called."""

from __future__ import annotations

from torch import nn

from .dispatcher import Dispatcher

__all__ = ["named_dispatchers"]


def named_dispatchers(model: nn.Module) -> dict[str, Dispatcher]:
    """Every dispatcher that a module of the model holds, alone or in a list, tuple or dict.

    Named by the module's path, and by the attribute as well where a module holds several.
    """
    named: dict[str, Dispatcher] = {}
    for path, module in model.named_modules():
        held: list[tuple[str, Dispatcher]] = []
        for attribute, value in vars(module).items():
            items = enumerate(value) if isinstance(value, (list, tuple)) else ()
            items = value.items() if isinstance(value, dict) else items
            held += [(f"{attribute}.{key}", item) for key, item in items if isinstance(item, Dispatcher)]
            if isinstance(value, Dispatcher):
                held.append((attribute, value))
        owner = path or type(module).__name__
        named |= {owner if len(held) == 1 else f"{owner}.{attribute}": dispatcher for attribute, dispatcher in held}
    return named
