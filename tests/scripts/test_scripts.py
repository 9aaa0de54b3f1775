"""Scenarios as text: commands above the line, what the machine orders below it.

With REWRITE_SCRIPTS=1 in the environment the recorded outputs are written anew; read the difference before you keep it.
"""
from __future__ import annotations

import os
import pathlib

import pytest

from tests.scripts.stage import Stage

SCRIPTS = sorted(pathlib.Path(__file__).parent.glob("*.txt"))
LINE = "----"


def blocks(text: str) -> list[tuple[str, str]]:
    """(commands, output) of each block; blocks are separated by empty lines."""
    found = []
    for block in text.strip().split("\n\n"):
        commands, _, output = block.partition(f"\n{LINE}")
        found.append((commands, output.strip("\n")))
    return found


def play(text: str) -> str:
    """The same script with what happens now."""
    stage = Stage()
    played = []
    for commands, _ in blocks(text):
        lines = [line for line in commands.splitlines() if not line.startswith("#")]
        output = [told for line in lines for told in stage.do(line)]
        played.append("\n".join([commands, LINE, *(output or ["ok"])]) if lines else commands)
    return "\n\n".join(played) + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path):
    text = path.read_text()
    played = play(text)
    if os.environ.get("REWRITE_SCRIPTS"):
        path.write_text(played)
        return
    assert played == text
