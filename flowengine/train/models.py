"""What a user's model is to the loops: a class with `gradient`, `apply` and `weights`, and with `loss` if it likes.

    gradient(step, rank, size)   arrays: of an array, list, tuple or dict; from this rank's part of what is learnt from
    apply(gradient)              changes the weights by the mean of what all ranks gave
    weights                      an attribute: all that members share and a newcomer needs
    loss()                       a number: the loss of the last gradient
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from flowengine.collectives.forms import Given, Opened
from flowengine.errors import BadType

NEEDED = ("gradient", "apply")


def checked_model(kind: Any, needed: tuple[str, ...] = NEEDED) -> Any:
    """The class, when it has the methods that the loops call."""
    if not isinstance(kind, type):
        raise BadType(f"a model is a class, which is made once in each member, not {kind!r}")
    for name in needed:
        if not callable(getattr(kind, name, None)):
            raise BadType(f"the model {kind.__name__} has no method {name!r}")
    return kind


def weights_of(model: Any) -> Any:
    """What members share of a model."""
    try:
        return model.weights
    except AttributeError:
        name = type(model).__name__
        raise BadType(f"the model {name} has no attribute 'weights': arrays, or a list or dict of them") from None


def content_of(weights: Any) -> int:
    """A number that is the same for the same bits."""
    return int.from_bytes(hashlib.blake2b(Given(Opened(weights, "weights")).blob(), digest_size=7).digest())


def loss_of(model: Any) -> float:
    """The loss of the last gradient; nan of a model that tells none."""
    return float(model.loss()) if hasattr(model, "loss") else math.nan
