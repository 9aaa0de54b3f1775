"""Reductions of large lists and dicts of arrays that lie on several hosts: as single arrays, made where they are.

Each input becomes one array for each dtype by a task on its host, so that what goes over the network is folded on its
way, as single arrays are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowengine.collectives.across import COURSE_FRACTION, Spread, in_tree
from flowengine.collectives.forms import Given, Opened, closed
from flowengine.collectives.ledger_headers import header_text
from flowengine.collectives.refs import near
from flowengine.collectives.totals import Array, made_dtype
from flowengine.core import messages as m
from flowengine.core.ids import short
from flowengine.errors import CollectiveMismatch
from flowengine.functions import Plan, pack_call, results_of
from flowengine.objects import arrays, codec
from flowengine.options import task_options
from flowengine.refs import ObjectRef, current_session

if TYPE_CHECKING:
    from flowengine.collectives.tree import Shape
    from flowengine.runtime.session import Session

FUSED_BYTES_MIN = 1 << 20  # of an input: below, the tasks cost more than they save
Kinds = tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each array
Fused = tuple[str, Kinds, tuple[str, Any], list[ObjectRef]]  # in words, kinds, form and tree, an array for each dtype


def is_scattered(session: Session, fold: str, refs: Sequence[ObjectRef]) -> bool:
    """Whether the inputs are large, several are on other hosts, and they are no arrays that are folded as they are."""
    away = plain = 0
    held: dict[str, int] = {}  # bytes by node: each is there twice, as it is and fused
    for ref in refs:
        value = session.owner.value_of(ref.oid)
        if type(value) is not m.Stored or not value.nodes or value.size_bytes < FUSED_BYTES_MIN:
            return False
        away += session.node not in value.nodes
        held[value.nodes[0]] = held.get(value.nodes[0], 0) + 2 * value.size_bytes
        if value.array:
            dtype = np.dtype(arrays.read_kind(value.array)[0])
            plain += made_dtype(fold, dtype) == dtype
    has_room = max(held.values()) <= session.store_limit_bytes * COURSE_FRACTION
    return away > 1 and plain < len(refs) and has_room


def fused_shape(session: Session, refs: Sequence[ObjectRef]) -> Shape:
    """In which order the arrays are folded that are made of inputs where these are."""
    nodes: dict[str, list[int]] = {}
    values = [session.owner.value_of(ref.oid) for ref in refs]
    for index, value in enumerate(values):
        nodes.setdefault(value.nodes[0] if type(value) is m.Stored else session.node, []).append(index)
    here = nodes.pop(session.node, [])
    nbytes = max([value.size_bytes for value in values if type(value) is m.Stored], default=0)
    return in_tree(session, Spread({**nodes, session.node: here}, b"", nbytes)).shape


def reduced_fused(
    session: Session, fold: str, refs: Sequence[ObjectRef], reduce: Callable[[list[ObjectRef]], ObjectRef]
) -> Any:
    """The reduction in the form of the first input; reduce: makes a reference to that of arrays, one for each input."""
    ids = {entry.address: entry.node_id for entry in session.all_nodes()}
    plans: dict[str, Plan] = {}
    made = []
    for ref in refs:
        value = session.owner.value_of(ref.oid)
        nodes = value.nodes if type(value) is m.Stored else ()
        place = ids.get(nodes[0], session.node_id) if nodes else session.node_id
        if place not in plans:
            options = task_options({"num_cpus": 0, "placement": near(place)})
            plans[place] = Plan(session, Fuse(fold), options, "fuse")
        spec, held = pack_call(plans[place], (ref,), {})
        session.submit(spec, plans[place].blob)
        del held
        made.append(results_of(session, spec))
    inputs: list[Fused] = session.get(made, None, False)
    text, kinds, (form, tree), _ = inputs[0]
    for number, (other_text, other_kinds, (other_form, _), _) in enumerate(inputs):
        if other_kinds != kinds or other_form != form:
            first = f"input 0 ({short(refs[0].oid)}): {text}"
            other = f"input {number} ({short(refs[number].oid)}): {other_text}"
            raise CollectiveMismatch(f"the inputs do not fit together: {other}; {first}")
    columns = [list(column) for column in zip(*[one[3] for one in inputs], strict=True)]
    totals = session.get([reduce(column) for column in columns], None, False)
    return closed(tree, cut(totals, kinds))


def cut(totals: Sequence[Array], kinds: Kinds) -> list[Array]:
    """The arrays of the result, out of one for each dtype."""
    at: dict[str, int] = {}
    by_dtype = dict(zip(dict.fromkeys(dtype for dtype, _ in kinds), totals, strict=True))
    found = []
    for dtype, shape in kinds:
        begin, size = at.get(dtype, 0), int(np.prod(shape, dtype=np.int64))
        found.append(by_dtype[dtype][begin : begin + size].reshape(shape))
        at[dtype] = begin + size
    return found


class Fuse:
    """What runs where an input is: its arrays as one for each dtype, in which they can be folded."""

    def __init__(self, fold: str) -> None:
        self.fold = fold

    def __call__(self, value: Any) -> Fused:
        session, opened = current_session(), Opened(value, "reduce")
        by_dtype: dict[str, list[Array]] = {}
        for array in opened.arrays:
            by_dtype.setdefault(array.dtype.str, []).append(array.reshape(-1))
        refs = []
        for group in by_dtype.values():
            fused = np.concatenate(group, dtype=made_dtype(self.fold, group[0].dtype))
            refs.append(session.put_packed(codec.pack(fused)))
        text = header_text(Given(opened).header("reduce", self.fold))
        kinds = tuple([(array.dtype.str, array.shape) for array in opened.arrays])
        return text, kinds, (opened.form, opened.tree), refs
