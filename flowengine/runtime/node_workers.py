"""The node shell's part for workers: starts them through the launcher, reads what they print, tells how they end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from flowengine.core.commands import CheckWorker, StartWorker, StopWorker, WorkerChecked, WorkerEnded
from flowengine.core.ids import TASK_ID_BYTES
from flowengine.core.messages import Death, LogLines, Message, WorkerStuck
from flowengine.runtime.open_files import two_pipes
from flowengine.runtime.settings import ForkWorker, SignalWorker, WorkerForked, WorkerReaped, WorkerSettings
from flowengine.runtime.worker_logs import WorkerLogs, logs_folder

if TYPE_CHECKING:
    from flowengine.config import Config

READ_BYTES = 65_536
DRAIN_READS_MAX = 256  # a process that the worker has left behind may print without end
ATTEMPT_BYTES = 4
NAME_BYTES = 64
DEADLINE_AT = TASK_ID_BYTES + ATTEMPT_BYTES + NAME_BYTES  # after id, attempt and name of what runs
DEADLINE_BYTES = 8
# When it has to be over at the latest: ms of the host's monotonic clock, 0: never.
RUNNING_BYTES = DEADLINE_AT + DEADLINE_BYTES
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STOPPED_STATES = "TtZ"
LOOPBACK = "127.0.0.1"
STOP_LOOK_S = 0.0002  # until a stop signal has come through
STOP_LOOKS_MAX = 50
SIGNATURE = re.compile(rb"\x1e([0-9a-f]*)\.([0-9a-f]*)\.([0-9a-f]*)\x1e")  # see notes.Signed

Step = Callable[[Message], None]
Say = Callable[..., None]  # (word for the launcher, descriptors that go with it)
Forward = Callable[[str, LogLines], None]  # (worker id, what it printed)


class Printer(NamedTuple):
    """Who printed a line: task and actor in hex, name; all "" where that was not said."""

    task: str = ""
    actor: str = ""
    name: str = ""


class Lines:
    """Cuts one output stream of a worker into lines, and tells who printed each."""

    def __init__(self, fd: int, stream: str, chars_max: int) -> None:
        self.fd = fd
        self.stream = stream
        self._chars_max = chars_max
        self._rest = b""
        self._printer = Printer()

    def read(self) -> tuple[list[tuple[Printer, str]], bool]:
        """The lines that are complete now, and whether more may be there."""
        try:
            part = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return [], False
        if not part:
            raise EOFError
        *whole, rest = (self._rest + part).split(b"\n")
        if len(rest) > 4 * self._chars_max:
            whole.append(rest)
            rest = b""
        self._rest = rest
        return [self._told(line) for line in whole], len(part) == READ_BYTES

    def last(self) -> list[tuple[Printer, str]]:
        """What was printed without an end of line."""
        rest, self._rest = self._rest, b""
        told = self._told(rest)
        return [told] if told[1] else []

    def _told(self, line: bytes) -> tuple[Printer, str]:
        if b"\x1e" not in line:
            return self._printer, self._text(line)
        parts, by = SIGNATURE.split(line), self._printer
        for at in range(1, len(parts), 4):
            task, actor, name = (part.decode() for part in parts[at : at + 3])
            self._printer = Printer(task, actor, bytes.fromhex(name).decode("utf-8", "replace"))
            by = self._printer if parts[at + 3] else by
        text = b"".join(parts[::4])
        return by if text else self._printer, self._text(text)

    def _text(self, line: bytes) -> str:
        text = line.decode("utf-8", "replace").removesuffix("\r")
        return text if len(text) <= self._chars_max else text[: self._chars_max] + " ..."


class Process:
    """A worker process as the shell sees it."""

    def __init__(self, worker_id: str, running_path: Path, streams: tuple[Lines, Lines], kept: int) -> None:
        self.worker_id = worker_id
        self.running_path = running_path
        self.streams = streams
        self.open = list(streams)
        self.kept: deque[str] = deque(maxlen=kept)
        self.pid = 0
        self.actor = ""  # that has printed

    def running(self) -> tuple[bytes, int, str]:
        """The task that it runs, its attempt and name; empty when it runs none."""
        try:
            note = self.running_path.read_bytes()
        except OSError:
            return b"", 0, ""
        task, rest = note[:TASK_ID_BYTES], note[TASK_ID_BYTES:]
        if not any(task):
            return b"", 0, ""
        name = rest[ATTEMPT_BYTES : ATTEMPT_BYTES + NAME_BYTES].rstrip(b"\0").decode("utf-8", "replace")
        return task, int.from_bytes(rest[:ATTEMPT_BYTES], "big"), name


    def overdue(self) -> bool:
        """Whether the task that it runs should long be over."""
        with contextlib.suppress(OSError):
            deadline_ms = int.from_bytes(self.running_path.read_bytes()[DEADLINE_AT:], "big")
            return 0 < deadline_ms <= time.monotonic() * 1000
        return False


class Workers:
    """All worker processes of a node; on its loop."""

    def __init__(self, template: WorkerSettings, say: Say, step: Step, forward: Forward) -> None:
        self.template = template
        self._say = say
        self._step = step
        self._forward = forward
        self._config: Config = template.config
        self._loop = asyncio.get_running_loop()
        self._processes: dict[str, Process] = {}
        folder = logs_folder(template.state_dir, template.session, os.getpid())
        self.logs = WorkerLogs(folder, template.config.log_file_bytes_max)

    # --- commands of the machine ------------------------------------------------------------------

    def start(self, command: StartWorker) -> None:
        """Have the launcher fork a worker."""
        worker_id = command.worker_id
        running_path = Path(self.template.store_folder, f".running-{worker_id}")
        try:
            running_path.write_bytes(bytes(RUNNING_BYTES))
            out_reader, out_writer, err_reader, err_writer = two_pipes()
        except OSError as error:
            running_path.unlink(missing_ok=True)
            self._step(WorkerEnded(Death(worker_id, self.template.host, 0, 1, reason=str(error))))
            return
        chars_max = self._config.log_line_chars_max
        streams = Lines(out_reader, "out", chars_max), Lines(err_reader, "err", chars_max)
        process = Process(worker_id, running_path, streams, self._config.log_lines_kept)
        self._processes[worker_id] = process
        for lines in streams:
            os.set_blocking(lines.fd, False)
            self._loop.add_reader(lines.fd, self._readable, process, lines)
        settings = msgspec.structs.replace(self.template, worker_id=worker_id, running_path=str(running_path))
        self._say(ForkWorker(settings), (out_writer, err_writer))

    def stop(self, command: StopWorker) -> None:
        """Have the launcher signal a worker: it alone knows that the process id is still that worker's."""
        self._say(SignalWorker(command.worker_id, command.signal))

    def stopped_in(self, worker_id: str, task: bytes) -> bool:
        """Have the worker stand still if it is in this task; else it goes on, perhaps with the next one."""
        process = self._processes.get(worker_id)
        if process is None or not process.pid or process.running()[0] != task:
            return False
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGSTOP)
            stat = Path(f"/proc/{process.pid}/stat")
            for _ in range(STOP_LOOKS_MAX):
                if stat.read_text().rpartition(")")[2].split()[0] in STOPPED_STATES:
                    break
                time.sleep(STOP_LOOK_S)
            if process.running()[0] == task:
                return True
            os.kill(process.pid, signal.SIGCONT)
        return False

    def check(self, command: CheckWorker) -> None:
        """See whether the process stands still; one that is gone is told by its reaping."""
        try:
            text = Path(f"/proc/{command.pid}/stat").read_text()
        except OSError:
            return
        process = self._processes.get(command.worker_id)
        if process is not None and process.overdue():
            reason = "its task holds the interpreter and did not stop after its time limit"
            self._step(WorkerStuck(command.worker_id, reason))
            return
        state, *fields = text.rpartition(")")[2].split()
        cpu_s = (int(fields[10]) + int(fields[11])) / CLOCK_TICKS_PER_S
        self._step(WorkerChecked(command.worker_id, state in STOPPED_STATES, cpu_s))

    # --- what the launcher tells ------------------------------------------------------------------

    def forked(self, word: WorkerForked) -> None:
        """The worker has a process id."""
        process = self._processes.get(word.worker_id)
        if process is not None:
            process.pid = word.pid

    def reaped(self, word: WorkerReaped) -> Death | None:
        """The worker ended: read the rest of what it printed and tell the machine."""
        process = self._processes.pop(word.worker_id, None)
        if process is None:
            return None
        for lines in list(process.open):
            self._drain(process, lines)
            self._close(process, lines)
        self.logs.ended(word.worker_id)
        task, attempt, name = process.running()
        overdue = process.overdue()
        with contextlib.suppress(OSError):
            process.running_path.unlink()
        death = Death(word.worker_id, self.template.host, word.pid, word.exit_code, task, attempt,
                      "" if word.pid else "it could not be forked", tuple(process.kept), overdue, name)
        self._step(WorkerEnded(death))
        return death

    # --- what they print --------------------------------------------------------------------------

    def running(self) -> dict[str, tuple[int, str, int, str]]:
        """What each worker runs, or ran last: process id, task in hex ("" for none), attempt, name."""
        found = {}
        for worker_id, process in self._processes.items():
            task, attempt, name = process.running()
            found[worker_id] = process.pid, task.hex(), attempt, name
        return found

    def drain(self) -> None:
        """Forward all that was printed until now, half lines too."""
        for process in list(self._processes.values()):
            for lines in list(process.open):
                self._drain(process, lines)
                self._tell(process, lines, lines.last())

    def close(self) -> None:
        """Stop reading."""
        for process in self._processes.values():
            for lines in list(process.open):
                self._close(process, lines)
        self.logs.close()

    def _readable(self, process: Process, lines: Lines) -> None:
        try:
            text, _ = lines.read()
        except (EOFError, OSError):
            self._close(process, lines)
            return
        self._tell(process, lines, text)

    def _drain(self, process: Process, lines: Lines) -> None:
        for _ in range(DRAIN_READS_MAX):
            try:
                text, more = lines.read()
            except (EOFError, OSError):
                self._close(process, lines)
                return
            self._tell(process, lines, text)
            if not more:
                return

    def _close(self, process: Process, lines: Lines) -> None:
        if lines not in process.open:
            return
        process.open.remove(lines)
        self._loop.remove_reader(lines.fd)
        os.close(lines.fd)
        self._tell(process, lines, lines.last())

    def _tell(self, process: Process, lines: Lines, told: list[tuple[Printer, str]]) -> None:
        for by, those in itertools.groupby(told, lambda line: line[0]):
            text = [line for _, line in those]
            process.kept.extend(text)
            process.actor = by.actor or process.actor
            if not by.task:  # what its code has started prints too
                task, _, name = process.running()
                by = Printer(task.hex(), process.actor, name)
            self.logs.keep(process.worker_id, process.pid, (by.task, by.actor), (lines.stream, text))
            where = "" if self.template.host == LOOPBACK else f" on {self.template.host}"
            source = f"{by.name or 'worker'} pid={process.pid}{where}"
            self._forward(process.worker_id, LogLines(source, lines.stream, tuple(text)))
