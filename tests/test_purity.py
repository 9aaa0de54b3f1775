"""Files that decide read nothing but their arguments: no clock, disk, environment, random source, no set order."""
from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

PROJECT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = PROJECT / "flowengine"

# Which files are pure: all of these that exist. Everything else is a shell.
PURE_GLOBS = (
    "options.py", "errors.py", "error_parts.py", "config.py", "core/*.py", "recovery/__init__.py",
    "scheduling/bundling.py", "scheduling/devices.py", "scheduling/placement.py", "scheduling/policies.py",
    "scheduling/resources.py", "scheduling/rooms.py", "scheduling/shares.py",
    "recovery/lineage.py", "recovery/stash.py", "recovery/membership.py", "recovery/checkpoint.py",
    "recovery/record.py", "recovery/failures.py",
    "collectives/plan*.py", "collectives/tree.py", "collectives/ledger*.py", "collectives/posts*.py",
    "collectives/seats*.py", "collectives/speeds.py", "chaos/faults.py", "chaos/sim*.py", "chaos/checkers.py",
    "observe/metrics.py", "observe/timeline.py", "observe/view.py", "train/buckets.py",
)
ALLOWED = frozenset((
    "__future__", "abc", "bisect", "collections", "copy", "dataclasses", "difflib", "enum", "functools", "hashlib",
    "heapq", "itertools", "math", "numbers", "operator", "re", "string", "struct", "types", "typing", "msgspec",
))
# Beyond these, by file and with the reason beside it.
ALLOWED_ALSO = {
    "errors.py": ("pickle", "traceback"),                            # packs what user code raised
    "error_parts.py": ("cloudpickle", "pickle", "signal"),           # the same; names of signals
    "chaos/faults.py": ("random",),                                  # random.Random(seed), nothing else of it
    "chaos/sim.py": ("random",),
    "chaos/sim_actor_programs.py": ("random",),
    "chaos/sim_collectives.py": ("random",),
    "chaos/sim_collectives_programs.py": ("random",),
    "chaos/sim_net.py": ("random",),
    "chaos/sim_programs.py": ("random",),
    "chaos/sim_world.py": ("random",),
}
SET_NAMES = ("set", "frozenset", "Set", "FrozenSet", "AbstractSet", "MutableSet")
SET_METHODS = ("union", "intersection", "difference", "symmetric_difference")
ORDER_FREE = ("sorted", "len", "min", "max", "any", "all", "set", "frozenset")   # give the same for every order
ORDERED_BY_THEM = ("list", "tuple", "iter", "enumerate", "next", "map", "filter", "zip", "reversed", "sum", "dict")


def pure_files() -> list[pathlib.Path]:
    found = {path for pattern in PURE_GLOBS for path in PACKAGE.glob(pattern)}
    return sorted(found)


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported(tree: ast.AST, name: str) -> Iterator[tuple[int, str]]:
    """Every module that the file imports, with the names taken from it as they may be modules too."""
    folders = ("flowengine", *pathlib.PurePosixPath(name).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ".".join(folders[:len(folders) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (here, node.module) if part)
            if module.split(".")[0] == "flowengine":
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def own_file(module: str) -> str | None:
    """The file of the package that an import reaches, its last part being perhaps only a name in it."""
    parts = module.split(".")[1:]
    for length in range(len(parts), -1, -1):
        stem = PACKAGE.joinpath(*parts[:length])
        if length and stem.with_suffix(".py").is_file():
            return name_of(stem.with_suffix(".py"))
        if (stem / "__init__.py").is_file():
            return name_of(stem / "__init__.py")
    return None


def import_faults(tree: ast.AST, name: str) -> Iterator[str]:
    pure = {name_of(path) for path in pure_files()}
    for line, module in imported(tree, name):
        top = module.split(".")[0]
        if top == "flowengine":
            if (target := own_file(module)) not in pure:
                yield f"{line}: imports the shell {target or module}"
        elif top not in ALLOWED and top not in ALLOWED_ALSO.get(name, ()):
            yield f"{line}: imports {module}"


def is_set_annotation(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.BinOp):
        return is_set_annotation(node.left) or is_set_annotation(node.right)
    if isinstance(node, ast.Subscript):
        node = node.value
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name in SET_NAMES


def called(node: ast.expr) -> str | None:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def target_name(node: ast.expr) -> str | None:
    """A plain name, or an attribute by its last part: `task.waiters` is known as `.waiters`."""
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) else None


class Sets:
    """What in one scope is known to be a set: by annotation or by what it was made from."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def holds(self, node: ast.expr) -> bool:
        if isinstance(node, (ast.Set, ast.SetComp)) or called(node) in ("set", "frozenset"):
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)):
            return self.holds(node.left) or self.holds(node.right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SET_METHODS:
            return True
        if isinstance(node, ast.IfExp):
            return self.holds(node.body) or self.holds(node.orelse)
        return target_name(node) in self.names


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the functions inside it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from own_nodes(child)


def set_names(scope: ast.AST, outer: set[str]) -> set[str]:
    names = set(outer)
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)
        names -= {arg.arg for arg in arguments}
        names |= {arg.arg for arg in arguments if is_set_annotation(arg.annotation)}
    for node in own_nodes(scope):
        if isinstance(node, ast.AnnAssign) and is_set_annotation(node.annotation):
            names.add(target_name(node.target) or "")
        if isinstance(node, ast.Assign) and Sets(names).holds(node.value):
            names |= {target_name(target) or "" for target in node.targets}
    return names - {""}


def class_fields(tree: ast.AST) -> set[str]:
    """Fields annotated as a set in some class and never as anything else."""
    sets, others = set(), set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in kind.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                (sets if is_set_annotation(node.annotation) else others).add(f".{node.target.id}")
    return sets - others


def scopes(node: ast.AST, outer: set[str]) -> Iterator[tuple[ast.AST, set[str]]]:
    names = set_names(node, outer)
    yield node, names
    for child in own_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from scopes(child, names)


def order_faults(tree: ast.Module) -> Iterator[str]:
    for scope, names in scopes(tree, class_fields(tree)):
        sets, free = Sets(names), []
        for node in own_nodes(scope):
            if called(node) in ORDER_FREE:
                free += [argument for argument in node.args if isinstance(argument, ast.GeneratorExp)]
            read: list[ast.expr] = []
            if isinstance(node, (ast.For, ast.AsyncFor)):
                read = [node.iter]
            elif isinstance(node, (ast.ListComp, ast.DictComp)) or (
                    isinstance(node, ast.GeneratorExp) and not any(node is known for known in free)):
                read = [part.iter for part in node.generators]
            elif isinstance(node, (ast.Starred, ast.YieldFrom)):
                read = [node.value]
            elif called(node) in ORDERED_BY_THEM:
                read = node.args
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pop":
                read = [node.func.value] if not node.args else []
            yield from (f"{node.lineno}: reads a set in its order" for part in read if sets.holds(part))


def call_faults(tree: ast.AST, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and called(node) in ("id", "hash", "open", "input", "exec", "eval", "__import__"):
            yield f"{node.lineno}: calls {called(node)}()"
        if (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
                and node.attr != "Random" and "random" in ALLOWED_ALSO.get(name, ())):
            yield f"{node.lineno}: uses random.{node.attr}, which is seeded by nobody"
        if isinstance(node, ast.ImportFrom) and node.module == "random" and [a.name for a in node.names] != ["Random"]:
            yield f"{node.lineno}: takes more from random than Random"


def faults(source: str, name: str) -> list[str]:
    tree = ast.parse(source)
    return [*import_faults(tree, name), *order_faults(tree), *call_faults(tree, name)]


@pytest.mark.parametrize("path", pure_files(), ids=name_of)
def test_pure_file(path):
    assert faults(path.read_text(), name_of(path)) == []


@pytest.mark.parametrize("source", [
    "import time", "from os import environ", "import asyncio.events", "import random", "from ..runtime import link",
    "from flowengine import cli", "from flowengine.runtime import link", "id(x)", "hash(x)", "open('f')",
    "for x in {1, 2}: pass", "for x in set(y): pass", "[x for x in {a for a in b}]", "list({1})", "[*{1}]",
    "s: set[int] = f()\nfor x in s: pass", "def f(s: frozenset[str]):\n  return tuple(s)", "x = set()\nx.pop()",
    "s = set(a) | b\nfor x in s: pass", "class A:\n  s: set[int]\ndef f(a):\n  return [x for x in a.s]",
    "def f(a):\n  self.s: set[int] = set()\n  return next(iter(self.s))", "for x in a.union(b): pass",
    "def f(s: 'set[int] | None'):\n  yield from s"])
def test_impurity_is_found(source):
    assert faults(source, "core/owner.py")


@pytest.mark.parametrize("source", [
    "import math, heapq", "from collections.abc import Iterator", "from flowengine.errors import FlowError",
    "from flowengine import options", "from ..errors import FlowError",
    "for x in sorted({1, 2}): pass", "any(x for x in {1, 2})", "1 in {1, 2}",
    "s: set[int] = set()\ns.add(1)\nlen(s)", "for x in [1]: pass", "d = {}\nd.pop(1)\nlist(d)",
    "def f(s: set[int]): return sorted(s)\ndef g(s: list[int]): return list(s)"])
def test_purity_is_left_alone(source):
    assert faults(source, "core/owner.py") == []


def test_random_is_for_the_simulator_and_seeded():
    assert faults("import random\nr = random.Random(7)", "chaos/sim.py") == []
    assert faults("import random\nr = random.random()", "chaos/sim.py")
