"""GPUs of this host: how many there are, and which of them a process may see."""

from __future__ import annotations

import os
import re

from flowengine.scheduling.devices import listed_in, names_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICE = re.compile(r"nvidia[0-9]+")


def count_gpus() -> int:
    """GPUs of this host that this process may use."""
    found = sum(DEVICE.fullmatch(name) is not None for name in os.listdir("/dev"))
    visible = os.environ.get(VISIBLE)
    return found if visible is None else min(found, len(listed_in(visible)))


def names_here(count: float) -> tuple[str, ...]:
    """Their names; raises BadValue when there are not so many."""
    return names_of(count, os.environ.get(VISIBLE))


def show(names: tuple[str, ...]) -> None:
    """From here on libraries that begin to use GPUs see these and no others."""
    os.environ[VISIBLE] = ",".join(names)


def ids_of(names: tuple[str, ...]) -> tuple[int | str, ...]:
    """Numbers where names are numbers."""
    return tuple([int(name) if name.isdigit() else name for name in names])
