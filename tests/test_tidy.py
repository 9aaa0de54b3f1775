"""What keeps the code small and plain: limits on size, no vague names, no machine's own paths, few ways into Dask."""
from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

PROJECT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = PROJECT / "flowengine"

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 6
LINE_CHARS_MAX = 120
BANNED_WORDS = ("data", "helper", "helpers", "info", "manager", "misc", "util", "utils")
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
ALLOWED_NAMES = ("NodeInfo", "WorkerInfo",)                   # a name of the public interface
ALLOWED_WIDE = (("api.py", "init"),)            # as above
PRINTING_FILES = ("cli.py", "observe/")         # their output is what they are for
DASK_FILES = ("runtime/handshake.py", "runtime/link.py", "objects/transfer.py", "deploy/dask.py",
              "interop/dask_graph.py")
MACHINE_PATH = re.compile(r"^/(?:tmp|home|root|Users|work|var|opt)(?:/|$)")
ADDRESS = re.compile(r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")


def sources(*folders: str) -> list[pathlib.Path]:
    return sorted(path for folder in folders for path in (PROJECT / folder).rglob("*.py"))


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else PROJECT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def docstrings(tree: ast.AST) -> list[ast.Constant]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = [node.body[0] for node in ast.walk(tree) if isinstance(node, kinds) and node.body]
    return [first.value for first in firsts if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)]


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring and decorators."""
    first = function.body[0]
    is_documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    documented = (first.end_lineno or 0) - first.lineno + 1 if is_documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - documented


def size_faults(source: str, tree: ast.AST) -> Iterator[str]:
    lines = source.splitlines()
    if len(lines) > FILE_LINES_MAX:
        yield f"{len(lines)} lines, at most {FILE_LINES_MAX}"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_CHARS_MAX:
            yield f"{number}: {len(line)} characters, at most {LINE_CHARS_MAX}"
    for function in functions(tree):
        if code_lines(function) > FUNCTION_LINES_MAX:
            yield f"{function.lineno}: {function.name} has {code_lines(function)} lines, at most {FUNCTION_LINES_MAX}"


def parameter_faults(tree: ast.AST, name: str) -> Iterator[str]:
    for function in functions(tree):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        named = [arg for arg in arguments if arg.arg not in ("self", "cls")]
        if len(named) > PARAMETERS_MAX and (name, function.name) not in ALLOWED_WIDE:
            yield f"{function.lineno}: {function.name} has {len(named)} parameters; make a struct of them"


def is_vague(name: str) -> bool:
    """Whether the last word of a name, in snake or camel case, is one that fits everything."""
    words = WORD.findall(name)
    return bool(words) and words[-1].lower() in BANNED_WORDS


def name_faults(tree: ast.AST, name: str) -> Iterator[str]:
    parts = pathlib.PurePosixPath(name).with_suffix("").parts
    yield from (f"0: {part} says nothing as the name of a module" for part in parts if is_vague(part))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and is_vague(node.name) and node.name not in ALLOWED_NAMES:
            yield f"{node.lineno}: {node.name} says nothing as the name of a class"


def word_faults(source: str) -> Iterator[str]:
    for number, line in enumerate(source.splitlines(), 1):
        if UNFINISHED.search(line):
            yield f"{number}: unfinished: {line.strip()}"


def literal_faults(tree: ast.AST) -> Iterator[str]:
    texts = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not any(node is text for text in texts):
            if MACHINE_PATH.search(node.value):
                yield f"{node.lineno}: the path {node.value!r} belongs to one machine"
            if ADDRESS.search(node.value):
                yield f"{node.lineno}: the address {node.value!r} belongs to one network"


def call_faults(tree: ast.AST, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if called == "print" and not name.startswith(PRINTING_FILES):
            yield f"{node.lineno}: print() belongs into {' and '.join(PRINTING_FILES)}"
        if called in ("breakpoint", "exec"):
            yield f"{node.lineno}: calls {called}()"


def dask_faults(tree: ast.AST, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        for module in modules:
            if module.split(".")[0] in ("dask", "distributed") and name not in DASK_FILES:
                yield f"{node.lineno}: imports {module}; only {', '.join(DASK_FILES)} may"


def faults(source: str, name: str) -> list[str]:
    tree = ast.parse(source)
    return [*size_faults(source, tree), *parameter_faults(tree, name), *name_faults(tree, name), *word_faults(source),
            *literal_faults(tree), *call_faults(tree, name), *dask_faults(tree, name)]


@pytest.mark.parametrize("path", sources("flowengine"), ids=name_of)
def test_package(path):
    assert faults(path.read_text(), name_of(path)) == []


@pytest.mark.parametrize("path", sources("tests", "experiments"), ids=name_of)
def test_tests_and_experiments_are_small_too(path):
    source = path.read_text()
    found = list(size_faults(source, ast.parse(source)))
    if path != pathlib.Path(__file__).resolve():       # this file has to name what it looks for
        found += word_faults(source)
    assert found == []


@pytest.mark.parametrize("path", sources("flowengine"), ids=name_of)
def test_modules_say_what_they_own(path):
    source = path.read_text()
    assert not source.strip() or ast.get_docstring(ast.parse(source))


@pytest.mark.parametrize(("source", "name"), [
    ("x = 1\n" * 601, "a.py"), ("def f():\n" + "    x = 1\n" * 61, "a.py"),
    ("def f(a, b, c, d, e, f, *, g): pass", "a.py"), ("x = 1", "core/utils.py"), ("x = 1", "data/a.py"),
    ("class TaskManager: pass", "a.py"), ("class JobData: pass", "a.py"), ("# TODO: later", "a.py"),
    ("p = '/tmp/x'", "a.py"), ("h = '10.0.0.1'", "a.py"),
    ("print(1)", "core/owner.py"), ("breakpoint()", "cli.py"), ("import distributed", "api.py"),
    ("from dask.base import tokenize", "core/ids.py"), (f"x = '{'a' * 120}'", "a.py")])
def test_faults_are_found(source, name):
    assert faults(source, name)


@pytest.mark.parametrize(("source", "name"), [
    ("print(1)", "cli.py"), ("print(1)", "observe/http.py"), ("import distributed.comm", "runtime/link.py"),
    ("h = '127.0.0.1'", "a.py"), ("class NodeInfo: pass", "api.py"), ("def f(self, a, b, c, d, e, g): pass", "a.py"),
    ("class Metadata: pass", "a.py"), ("'''Files under /tmp are not ours.'''", "a.py"), ("p = '/dev/shm'", "a.py")])
def test_what_is_plain_is_left_alone(source, name):
    assert faults(source, name) == []
