"""Named points in a worker at which it kills itself when the failure laboratory has armed them. Shell.

The arms of a session are small files, so that a worker that starts later has them too, and a passage is counted once
whichever worker makes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any


class Arm:
    """A point that at() has armed: how often it was passed, and whether that did the harm."""

    def __init__(self, folder: Path, name: str, point: str, nth: int) -> None:
        self.file = folder / f"{name}.arm"
        self.count = folder / f"{name}.count"
        self.point = point
        self.nth = nth
        self.spared = False

    @property
    def passages(self) -> int:
        """Passages so far, in all processes of this host; those after the harm do not count."""
        return self.count.stat().st_size if self.count.exists() and not self.spared else 0

    @property
    def fired(self) -> bool:
        """Whether a process was harmed here."""
        return self.passages >= self.nth

    def disarm(self) -> None:
        """From now on the point does no harm."""
        if not self.fired:
            self.spared = True
            self.file.unlink(missing_ok=True)
            with open(self.count, "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(b"." * (self.nth + 1))  # whoever passes next is beyond the one that counts

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, *raised: object) -> None:
        self.disarm()

    def __repr__(self) -> str:
        state = "fired" if self.fired else "disarmed" if self.spared else f"passed {self.passages} of {self.nth} times"
        return f"Arm({self.point}, {state})"


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
                with contextlib.suppress(FileNotFoundError):  # it was disarmed at this moment
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
