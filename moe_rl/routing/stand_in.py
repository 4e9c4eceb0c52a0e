"""Stand-ins: what takes the place of a module's method while scopes are open on it, and gives it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from moe_rl.errors import RoutingError


class StandIn:
    """Stands in for one attribute of a module while at least one scope is open on it."""

    attribute: str

    def __init__(self, owner: nn.Module):
        self.owner, self.original = owner, getattr(owner, self.attribute)
        self.previous = owner.__dict__.get(self.attribute)
        self.scopes: list[Any] = []

    @classmethod
    def on(cls, owner: nn.Module, *args: Any) -> Any:
        """The one that stands there already, or a new one."""
        current = owner.__dict__.get(cls.attribute)
        return current if isinstance(current, cls) else cls(owner, *args)

    @property
    def idle(self) -> bool:
        return not self.scopes

    def take_place(self) -> None:
        setattr(self.owner, self.attribute, self)

    def give_back(self) -> None:
        """Restore what was there before, unless somebody has wrapped this one meanwhile: it then only hands on."""
        if self.owner.__dict__.get(self.attribute) is not self:
            return
        delattr(self.owner, self.attribute)
        if self.previous is not None:
            setattr(self.owner, self.attribute, self.previous)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise RoutingError(
            "the model is inside record_routing or replay_routing, and a copy of it would go on recording or replaying "
            "for ever; copy it outside the block."
        )


@contextmanager
def opened(stand_ins: Sequence[StandIn], kind: str, what: Any) -> Iterator[None]:
    """Put `what` last in the list `kind` of each; take it off again, come what may and in whatever order."""
    for stand_in in stand_ins:
        stand_in.take_place()
        getattr(stand_in, kind).append(what)
    try:
        yield
    finally:
        for stand_in in stand_ins:
            entries = getattr(stand_in, kind)
            # The last of its kind: a recomputation puts the replay of its forward there a second time.
            del entries[max(i for i, entry in enumerate(entries) if entry is what)]
            if stand_in.idle:
                stand_in.give_back()
