"""The newest policies that went out, for whoever computes with what actors acted on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from broker.contract import messages

_MODELS_MAX, _MODELS_BYTES = 256, 64_000_000


class ModelStore:
    """Keeps policies by their place among all, whichever channel they went out on. From any thread.

    Args:
        stored: Returns a policy from the run's files; None if it is not there.
    """

    def __init__(self, stored: Callable[[messages.Order], bytes | None]) -> None:
        self._stored = stored
        self._models: OrderedDict[messages.Order, bytes] = OrderedDict()

    def note(self, order: messages.Order, model: bytes) -> None:
        """Keeps a policy that goes out; of older ones, as many as have room."""
        models = OrderedDict(self._models)
        models[order] = model
        while len(models) > 1 and (len(models) > _MODELS_MAX or sum(map(len, models.values())) > _MODELS_BYTES):
            models.popitem(last=False)
        self._models = models

    def get(self, order: messages.Order) -> bytes | None:
        """Returns a policy that is kept here."""
        return self._models.get(order)

    def find(self, order: messages.Order) -> bytes | None:
        """Returns the same, or else from the run's files, which are read then."""
        return self._models.get(order) or self._stored(order)

    def newest_first(self) -> Iterator[tuple[messages.Order, bytes]]:
        """Yields what is kept here, the newest first."""
        return reversed(self._models.items())
