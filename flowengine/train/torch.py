"""Modules of torch in a group: gradients are averaged in buckets, while backward goes on with the layers before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import flowengine as flow
from flowengine.options import whole
from flowengine.train.buckets import Buckets

if TYPE_CHECKING:
    from flowengine.collectives.group import Group

try:
    import torch
except ImportError:
    raise ImportError("flow.train.torch needs torch, which is not installed: pip install torch") from None

BUCKET_BYTES = 16 << 20


class DistributedDataParallel:
    """A module of which each rank has a copy; after backward(), synchronize() leaves the mean gradients in them.

    All ranks begin with the parameters and buffers of rank 0. Call synchronize() before the optimizer's step.
    """

    def __init__(self, module: Any, group: Group, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.module = module
        self.group = group
        limit_bytes = whole("bucket_bytes", bucket_bytes, 1, 1 << 40)
        # Backward comes to the last layers first.
        self.parameters = [one for one in reversed(list(module.parameters())) if one.requires_grad]
        sizes_bytes = [one.numel() * one.element_size() for one in self.parameters]
        self.buckets = Buckets(sizes_bytes, limit_bytes)
        self.under_way: list[tuple[int, flow.ObjectRef]] = []
        self.is_local = False
        self.hooks: list[Any] = []
        self.broadcast()
        self._watch()

    def _watch(self) -> None:
        self.hooks = [
            one.register_post_accumulate_grad_hook(self._hook(number)) for number, one in enumerate(self.parameters)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hooks": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()  # hooks are not part of a tensor that is pickled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def broadcast(self) -> None:
        """Parameters and buffers become those of rank 0."""
        mine = [one.detach() for one in (*self.module.parameters(), *self.module.buffers())]
        theirs = self.group.broadcast(mine if self.group.rank == 0 else None)
        if self.group.rank != 0:
            with torch.no_grad():
                for one, other in zip(mine, theirs, strict=True):
                    one.copy_(torch.as_tensor(other))

    def synchronize(self) -> None:
        """Wait until the gradients of all parameters are the means of all ranks; who has none counts as zeros."""
        for number in self.buckets.rest():
            self._send(number)
        under_way, self.under_way = self.under_way, []
        self.buckets.begin()
        for number, ref in under_way:
            for item, mean in zip(self.buckets.buckets[number], flow.get(ref), strict=True):
                self.parameters[item].grad.copy_(mean)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward only adds up here, for the next one to send: gradients of several batches, one synchronize()."""
        self.is_local = True
        try:
            yield
        finally:
            self.is_local = False

    def remove(self) -> None:
        """The module is as it was before; its backward sends nothing."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def _hook(self, item: int) -> Any:
        def there(parameter: Any) -> None:
            if not self.is_local:
                for number in self.buckets.arrived(item):
                    self._send(number)

        return there

    def _send(self, number: int) -> None:
        """Begin to average a bucket; nobody waits yet."""
        given = []
        for item in self.buckets.buckets[number]:
            parameter = self.parameters[item]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            given.append(parameter.grad)
        self.under_way.append((number, self.group.allreduce(given, op="mean", wait=False)))
