"""Who is next when tenants share what there is: weighted and hierarchical max-min by virtual time.

Each tenant has a clock that runs by what it used, divided by its weight; the one whose clock is behind is next. Who had
nothing that waited starts again at the clock of those that had: what it left idle was lent, and is not paid back.
Source: start-time fair queueing (Goyal, Vin and Cheng, 1996), at each level of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flowengine.errors import BadValue

Path = tuple[tuple[str, float], ...]  # from the root: names and weights; the last is OWN

OWN = ("", 1.0)  # what a tenant does itself, beside those that it is divided into
OTHERS: Path = (OWN,)  # whoever belongs to no tenant


class Tenant:
    """A tenant or an organisation of several."""

    __slots__ = ("children", "clock", "last", "waiting")

    def __init__(self) -> None:
        self.children: dict[str, Tenant] = {}
        self.clock = 0.0  # what it used, by weight
        self.last = 0.0  # the clock of the child that was served last, at that moment
        self.waiting = 0  # tasks of it and below it that wait

    def child(self, name: str) -> Tenant:
        """The one of that name, made when it is new."""
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = Tenant()
        return found

    def start(self) -> float:
        """The clock at which a child begins that had nothing that waited."""
        return min((child.clock for child in self.children.values() if child.waiting), default=self.last)


class Shares:
    """Clocks of all tenants of one process."""

    def __init__(self) -> None:
        self.root = Tenant()
        self.named: dict[tuple[str, str], Path] = {}  # by program and name: the way there, with weights

    def check(self, job: str, path: Path) -> None:
        """A program uses a tenant; raises BadValue when one of the same name has another weight or parent."""
        for end, (name, _) in enumerate(path, 1):
            known = self.named.setdefault((job, name), path[:end]) if name else path[:end]
            if known != path[:end]:
                raise BadValue(
                    f"placement: there is a fair_share {name!r} already, {shown(known)}, and it cannot be also "
                    f"{shown(path[:end])}"
                )

    def line(self, path: Path) -> Iterator[tuple[Tenant, Tenant, float]]:
        """Parent, child and the child's weight, for each level."""
        above = self.root
        for name, weight in path:
            tenant = above.child(name)
            yield above, tenant, weight
            above = tenant

    def came(self, path: Path) -> None:
        """A task of the tenant waits."""
        for above, tenant, _ in self.line(path):
            if tenant.waiting == 0:
                tenant.clock = max(tenant.clock, above.start())
            tenant.waiting += 1

    def went(self, path: Path) -> None:
        """It waits no more."""
        for _, tenant, _ in self.line(path):
            tenant.waiting -= 1

    def began(self, path: Path, amount: float) -> None:
        """A task of the tenant was served, and is expected to use so much."""
        for above, tenant, weight in self.line(path):
            above.last = tenant.clock
            tenant.clock += amount / weight

    def used(self, path: Path, amount: float) -> None:
        """A task used so much more than was expected, or, below 0, so much less."""
        for _, tenant, weight in self.line(path):
            tenant.clock += amount / weight

    def first(self, paths: Iterable[Path]) -> Path:
        """Whose turn it is; there is at least one, and each of them has tasks that wait."""
        above, left = self.root, list(paths)
        for level in range(max(map(len, left))):
            clocks = {path[level][0]: above.child(path[level][0]).clock for path in left}
            name = min(clocks, key=clocks.__getitem__)
            above, left = above.child(name), [path for path in left if path[level][0] == name]
            if name == OWN[0]:
                break
        return left[0]

    def lead(self, path: Path, other: Path) -> float:
        """How far the first tenant's clock is before the second's, where their ways from the root part."""
        for (_, mine, _), (_, theirs, _) in zip(self.line(path), self.line(other), strict=False):
            if mine is not theirs:
                return mine.clock - theirs.clock
        return 0.0


def shown(path: Path) -> str:
    """A tenant in words."""
    parent = f" below {path[-2][0]!r}" if len(path) > 1 else ""
    return f"of weight {path[-1][1]:g}{parent}"
