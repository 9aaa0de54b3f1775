"""The public surface: what `flowengine.__all__` lists, and nothing else."""
from __future__ import annotations

import ast
import importlib.metadata
import pathlib
import subprocess
import sys
import types

import pytest

import flowengine
from flowengine import errors


def test_the_list_is_sorted_and_without_repeats():
    assert list(flowengine.__all__) == sorted(set(flowengine.__all__))


@pytest.mark.parametrize("name", flowengine.__all__)
def test_every_public_name_exists_and_is_documented(name):
    value = getattr(flowengine, name)
    assert not name.startswith("_") or name == "__version__"
    assert getattr(value, "__doc__", None)


def test_nothing_public_is_left_out():
    public = {name for name, value in vars(flowengine).items()
              if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"}
    assert public <= set(flowengine.__all__)


def test_the_package_file_holds_names_and_nothing_else():
    tree = ast.parse(pathlib.Path(flowengine.__file__).read_text())
    made = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    assert not [node for node in ast.walk(tree) if isinstance(node, made)]


def test_exported_errors_are_those_of_the_tree():
    listed = {name for name in flowengine.__all__ if isinstance(getattr(flowengine, name), type)
              and issubclass(getattr(flowengine, name), BaseException)}
    assert all(getattr(errors, name, None) is getattr(flowengine, name) for name in listed)


def test_the_import_brings_nothing_that_takes_long():
    """What the engine needs is imported while it starts."""
    heavy = ("dask", "distributed", "joblib", "pandas", "pyarrow", "rich")
    code = f"import sys, flowengine; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_version_is_that_of_the_installed_package():
    try:
        installed = importlib.metadata.version("flowengine")
    except importlib.metadata.PackageNotFoundError:
        installed = flowengine.__version__      # run from the source tree
    assert installed == flowengine.__version__
