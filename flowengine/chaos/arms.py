"""Named points in a worker at which it kills itself when the failure laboratory has armed them. Shell.

The arms of a session are small files, so that a worker that starts later has them too, and a passage is counted once
whichever worker makes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any


class Arms:
    """The armed points of one host's session."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.points: dict[str, list[list[Any]]] = {}
        self.read()

    def read(self) -> None:
        """Arm what is armed by now."""
        if self.folder.is_dir():
            for file in sorted(self.folder.glob("*.arm")):
                self.add(json.loads(file.read_text()))

    def add(self, arm: Any) -> None:
        """Arm a point: [name of the arm, point, task name or id or "", which passage]."""
        known = self.points.setdefault(arm[1], [])
        if all(other[0] != arm[0] for other in known):
            known.append(list(arm))

    def passed(self, point: str, names: tuple[str, ...]) -> None:
        """The running task passes a point: the process ends here when it is the armed passage."""
        for arm in list(self.points.get(point, ())):
            if arm[2] and arm[2] not in names:
                continue
            count = self._count(arm[0])
            if count >= arm[3]:
                self.points[point].remove(arm)
            if count == arm[3]:
                os.kill(os.getpid(), signal.SIGKILL)

    def _count(self, arm: str) -> int:
        """Passages so far over all workers, this one included."""
        with open(self.folder / f"{arm}.count", "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(b".")
            file.flush()
            return file.tell()
