"""Training loops over actors and groups: synchronous, asynchronous, elastic; flow.train.torch for modules of torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import torch as torch
    from .elastic import Elastic
    from .parallel import DataParallel
    from .server import ParameterServer

PLACES = {"DataParallel": "parallel", "Elastic": "elastic", "ParameterServer": "server"}
__all__ = ["DataParallel", "Elastic", "ParameterServer", "torch"]


def __getattr__(name: str) -> Any:
    # Programs that train nothing start without it.
    if name in PLACES:
        return getattr(importlib.import_module(f"{__name__}.{PLACES[name]}"), name)
    if name == "torch":
        return importlib.import_module(f"{__name__}.torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
