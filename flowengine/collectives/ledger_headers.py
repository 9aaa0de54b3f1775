"""What members asked for: whether it fits together, in which words it is told when it does not, who gives and takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from flowengine.core.collective import WHOLE, ArrayPart, Header, Step

from .plan_ways import items

FOLDING = ("allreduce", "reduce", "reduce_scatter")
MOVING = ("broadcast", "allgather", "gather", "scatter", "alltoall", "send")
SHARED = ("allreduce", "broadcast", "allgather")  # all ranks get the same
EMPTY = ("barrier", "admit")
FOLDS = ("sum", "prod", "min", "max", "mean")
ON_FAILURE = ("recover", "shrink", "raise")
FROM_ROOT = ("broadcast", "scatter")
DEALT = ("scatter", "alltoall")  # one item for each rank
RECEIVING = "recv"
EPOCH_STEPS = 1 << 32  # numbers of sends of one numbering of the ranks
PARTS_SHOWN = 4
FORM_SHOWN = 200  # characters
RANKS_SHOWN = 16
KIND_NAMES = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
FOLDED_KINDS = "biufc"


# --- words ----------------------------------------------------------------------------------------


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0-6", "ranks 0, 2-3"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return f"rank {runs[0][0]}"
    return "ranks " + ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def step_text(step: Step) -> str:
    """A step in words."""
    source, target, number = step
    if source == WHOLE:
        return f"step {number}"
    return f"step {number % EPOCH_STEPS} from rank {source} to rank {target}"


def dtype_text(dtype: str) -> str:
    """Numpy's long name of a dtype, "float32" for "<f4"; itself when it has none."""
    kind, size = _kind(dtype), dtype.lstrip("<=|>")[1:]
    if kind == "b":
        return "bool"
    if kind in KIND_NAMES and size.isdigit() and not dtype.startswith(">"):
        return f"{KIND_NAMES[kind]}{8 * int(size)}"
    return dtype


def header_text(header: Header) -> str:
    """What a member asked for, in words."""
    details = [header.fold] if header.fold else []
    if header.root >= 0:
        details.append(f"root {header.root}")
    asked = f"{header.op}({', '.join(details)})" if details else header.op
    shown = [_part_text(part) for part in header.parts[:PARTS_SHOWN]]
    if len(header.parts) > PARTS_SHOWN:
        shown.append(f"{len(header.parts) - PARTS_SHOWN} more")
    if not shown and header.form in ("", "*"):
        return asked
    form = "" if header.form in ("", "*") else f"{_clipped(header.form)}: "
    return f"{asked} of {form}{', '.join(shown)}"


def hidden_difference(one: Header, other: Header) -> str:
    """Where arrays and forms of two first differ, if `header_text` does not show it."""
    found = []
    if one.form != other.form and max(len(one.form), len(other.form)) > FORM_SHOWN:
        pairs = enumerate(zip(one.form, other.form, strict=False))
        at = next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(one.form), len(other.form)))
        begin = max(0, at - FORM_SHOWN // 4)
        mine, theirs = [form[begin : begin + FORM_SHOWN // 2] for form in (one.form, other.form)]
        found.append(f"forms differ first at ...{mine}... and ...{theirs}...")
    for number, (part, another) in enumerate(zip(one.parts, other.parts, strict=False)):
        if (part.dtype, part.shape) != (another.dtype, another.shape):
            if number >= PARTS_SHOWN:
                found.append(f"array {number} is {_part_text(part)} and {_part_text(another)}")
            break
    return "; ".join(found)


def _clipped(form: str) -> str:
    return form if len(form) <= FORM_SHOWN else f"{form[: FORM_SHOWN - 3]}..."


def _part_text(part: ArrayPart) -> str:
    return f"{dtype_text(part.dtype)} {_shape_text(part.shape)}"


def _shape_text(shape: tuple[int, ...]) -> str:
    return f"({shape[0]},)" if len(shape) == 1 else f"({', '.join(str(length) for length in shape)})"


# --- whether it fits together ---------------------------------------------------------------------


def mismatch(name: str, step: Step, headers: Mapping[int, Header]) -> str:
    """Why these ranks cannot do the step together; empty when they can."""
    differences = list(dict.fromkeys(_differences(step, headers)))
    if not differences:
        return ""
    same: dict[Header, list[int]] = {}
    for rank in sorted(headers):
        same.setdefault(headers[rank], []).append(rank)
    given = [f"{ranks_text(ranks)}: {header_text(header)}" for header, ranks in same.items()]
    if len(given) > RANKS_SHOWN:
        given[RANKS_SHOWN:] = [f"{len(given) - RANKS_SHOWN} more"]
    listed = "; ".join(given)
    where = ""
    if any(what in differences for what in ("form", "dtype", "shape")):
        hidden = [hidden_difference(one, other) for one, other in pairwise(header for header in same if header.form)]
        where = next((f" ({text})" for text in hidden if text), "")
    return (
        f"ranks of group {name!r} did not ask for the same at {step_text(step)}: {listed}: "
        f"they differ in {', '.join(differences)}{where}"
    )


def _differences(step: Step, headers: Mapping[int, Header]) -> Iterator[str]:
    ranks = sorted(headers)
    first = headers[ranks[0]]
    if first.op not in FROM_ROOT and all(header == first for header in headers.values()):
        return  # as nearly always
    for rank in ranks[1:]:
        if _op(headers[rank]) != _op(first):
            yield "operation"
            return
    for rank in ranks[1:]:
        if headers[rank].fold != first.fold:
            yield "reduction"
        if headers[rank].root != first.root:
            yield "root"
    if first.op in FROM_ROOT:
        model = headers.get(first.root)
        others = [headers[rank] for rank in ranks if rank != first.root and headers[rank].form]
        if model is not None and first.op == "broadcast":
            for header in others:
                yield from _part_differences(model, header)
    elif first.op in FOLDING:
        for rank in ranks[1:]:
            yield from _part_differences(first, headers[rank])


def _part_differences(one: Header, other: Header) -> Iterator[str]:
    if one.form != other.form:
        yield "form"
    if len(one.parts) != len(other.parts):
        yield "number of arrays"
        return
    for mine, theirs in zip(one.parts, other.parts, strict=True):
        if mine.dtype != theirs.dtype:
            yield "dtype"
        if mine.shape != theirs.shape:
            yield "shape"


def _op(header: Header) -> str:
    return "send" if header.op == RECEIVING else header.op


def refusal(step: Step, headers: Mapping[int, Header], size: int) -> str:
    """Why nobody could do what all of these ranks ask for; empty when it can be done."""
    rank = min(headers)
    header = headers[rank]
    op = _op(header)
    if op not in (*FOLDING, *MOVING, *EMPTY):
        return f"there is no operation {header.op!r}"
    if (step[0] == WHOLE) == (op == "send"):
        return f"{op} cannot be asked for as {step_text(step)}"
    if op in (*FROM_ROOT, "reduce", "gather") and not 0 <= header.root < size:
        return f"{op} needs a root of 0 to {size - 1}, not {header.root}"
    if op in FROM_ROOT and not headers[header.root].form:
        return f"{op}: rank {header.root} is the root and has to give something"
    if op in FOLDING:
        return _fold_refusal(header, size)
    for giver, given in sorted(headers.items()):
        for part in given.parts:
            if _kind(part.dtype) == "O":
                return f"{op}: arrays of Python objects cannot be sent, rank {giver} gave one"
        if op == "alltoall" or (op == "scatter" and giver == header.root):
            count = len(list(items(given)))
            if count != size:
                return f"{op} needs {size} items, one for each rank; rank {giver} gave {count}"
    return ""


def _fold_refusal(header: Header, size: int) -> str:
    if header.fold not in FOLDS:
        return f"there is no reduction {header.fold!r}; there are {', '.join(FOLDS)}"
    for part in header.parts:
        kind = _kind(part.dtype)
        if kind not in FOLDED_KINDS:
            return f"{header.op}({header.fold}) of {dtype_text(part.dtype)} is not defined"
        if kind == "c" and header.fold in ("min", "max"):
            return f"{header.op}({header.fold}) of {dtype_text(part.dtype)}: complex numbers have no order"
        if header.op == "reduce_scatter" and not part.shape:
            return f"reduce_scatter cuts arrays along their first axis into {size}; an array of shape () has none"
    return ""


def _kind(dtype: str) -> str:
    return dtype.lstrip("<=|>")[:1]


def dealt_to(header: Header, stays: Sequence[bool]) -> Header:
    """The same without the items for ranks that do not stay; their bytes are left where they lie."""
    if header.op not in DEALT or not header.form or all(stays):
        return header
    dealt = list(items(header))
    if len(dealt) != len(stays):
        return header  # it is refused
    kept = [item for item, is_kept in zip(dealt, stays, strict=True) if is_kept]
    form = f"[{', '.join(form for form, _ in kept)}]"
    return msgspec.structs.replace(header, form=form, parts=tuple(part for _, parts in kept for part in parts))


# --- who gives and who takes ----------------------------------------------------------------------


def takes(header: Header, step: Step, rank: int) -> bool:
    """Whether a rank gets something from a step; the others get None."""
    if step[0] != WHOLE:
        return rank == step[1]
    if header.op in ("reduce", "gather"):
        return rank == header.root
    return header.op not in EMPTY


def gives(header: Header, step: Step, rank: int) -> bool:
    """Whether what a rank gave counts."""
    if step[0] != WHOLE:
        return rank == step[0]
    return header.op not in EMPTY and (header.op not in FROM_ROOT or rank == header.root)
