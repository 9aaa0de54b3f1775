"""Resources that programs make at run time: named amounts on nodes, which tasks may ask for before or after they exist.

Names belong to the program that made them, with all its tasks and actors; another program may use the same name for its
own. They survive the death of any process but the program itself, and end with it. An order is done and safe when the
call returns. Design: the ephemeral resources of ESCHER (Bhardwaj et al., SoCC'22).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .core.commands import Send
from .core.messages import OrderSeen
from .core.owner_state import AmountLessened
from .errors import BadType, BadValue
from .options import NAME_CHARS_MAX, real
from .refs import Current
from .scheduling.policies import check_text
from .scheduling.resources import AT, BUILTIN, LIMITLESS, SCALE, SEP, key_of, program_of

if TYPE_CHECKING:
    from .runtime.session import Session

__all__ = ["add", "create", "delete", "list", "set"]

AMOUNT_MAX = 1e14  # beyond it take infinity
CHOICE = "resource"  # what changes are counted as among the choices of a task


def create(name: str, amount: float, node: str | Mapping[str, float] | None = None) -> None:
    """Make a resource: on one node that the engine chooses, a node (its id), or each node with these amounts ({}: all).

    amount: how much each of its places has, from 0; math.inf for no limit. The same again changes nothing, so that a
    task may run again; raises BadValue when the name is there with another amount or place, or is one that nodes have
    by themselves. What may be anywhere moves when its node dies; what is on each node is also on those that join.
    """
    session = _session()
    units = _units("amount", amount)
    if node is not None and not isinstance(node, str | Mapping):
        raise BadType(f"node must be the id of a node, a dict of amounts that it must have, or None, not {node!r}")
    selector = None if not isinstance(node, Mapping) else _selector(node)
    where = check_text("node", node) if isinstance(node, str) else None
    _order(session, "create", [_key(session, name), units, where, selector, session.node_id])


def set(name: str, amount: float) -> None:
    """Give a resource another amount, at each of its places; less than is in use: tasks that end make up for it.

    Of what this takes away no more is given when the call returns. Raises BadValue when there is no such resource.
    """
    session = _session()
    key = _key(session, name)
    _order(session, "set", [key, _units("amount", amount)])
    session.step(AmountLessened(key))  # of more, slots are given anew at once


def add(name: str, change: float) -> None:
    """Change the amount of a resource by so much, at each of its places; changes may come in any order.

    A task that runs again adds once. Raises BadValue when there is no such resource.
    """
    session = _session()
    change = real("change", change, -AMOUNT_MAX, AMOUNT_MAX)
    context = session.context
    number = context.next_choice(CHOICE)
    key = _key(session, name)
    _order(session, "add", [key, round(change * SCALE), f"{context.task.hex()}/{number}"])
    if change < 0:
        session.step(AmountLessened(key))


def delete(name: str) -> None:
    """Remove a resource; what is in use is given back when its tasks end. Nothing happens when it is not there.

    When the call returns no more of it is given, and this process uses no slot that it had of it once more. Raises
    BadValue for what nodes have by themselves.
    """
    session = _session()
    key = _key(session, name)
    _order(session, "delete", [key])
    session.step(AmountLessened(key))


def list() -> dict[str, dict[str, Any]]:
    """This program's resources by name: total, available, the same by node, and why it is nowhere ("": it is there).

    What is available is as nodes told last, at most a few tenths of a second ago.
    """
    session = _session()
    return session.ask_head("resource.list", job(session)) or {}


def job(session: Session) -> str:
    """The program for which the running code works: its driver's address."""
    return program_of(session.context.driver, session.address)


def _session() -> Session:
    from .functions import start_default

    return Current.session or start_default()


def _order(session: Session, verb: str, argument: Any) -> None:
    session.context.reach_out()
    number, wrong = session.ask_head(f"resource.{verb}", argument) or (0, "")
    if wrong:
        raise BadValue(wrong)
    if number:  # goes out with what this code does next: so it has gone on when the order is done
        session.drive.begin("an order about resources", [Send(session.head, OrderSeen(number), lazy=True)])


def _key(session: Session, name: str) -> str:
    if not isinstance(name, str):
        raise BadType(f"the name of a resource is a string, not {name!r}")
    if not name or len(name) > NAME_CHARS_MAX:
        raise BadValue(f"the name of a resource has 1 to {NAME_CHARS_MAX} characters, not {name[:40]!r}")
    if not name.isprintable():
        raise BadValue(f"the name of a resource has printable characters, not {name[:40]!r}")
    if name in BUILTIN:
        raise BadValue(f"{name} is what nodes have by themselves: a program cannot make it")
    if AT in name or SEP in name:
        raise BadValue(f"the name of a resource cannot hold {AT!r}, which is for names that the engine makes: {name!r}")
    return key_of(name, job(session))


def _units(name: str, amount: float) -> int:
    if isinstance(amount, float) and amount == math.inf:
        return LIMITLESS
    count = real(name, amount, 0, AMOUNT_MAX)
    return max(1, round(count * SCALE)) if count > 0 else 0


def _selector(node: Mapping[str, float]) -> Any:
    for name in node:
        if not isinstance(name, str):
            raise BadType(f"node must have strings as names, not {name!r}")
        check_text("node must have names that", name)
    return [[name, real(f"node[{name!r}]", amount, 0, AMOUNT_MAX)] for name, amount in sorted(node.items())]
