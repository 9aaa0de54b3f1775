"""Programs that own something at the head: a link to each tells when one has ended, also while there was no head."""

from __future__ import annotations

from collections.abc import Callable

from .dispatch import Outbox, Part, on
from .messages import Message, Ping, Pong


class JobDoubted(Message, frozen=True):
    """The link to a program was lost a while ago."""

    job: str


class Jobs(Part):
    """A program is gone when it has ended, or its link is lost twice: once may be the link of an earlier head."""

    def __init__(self, out: Outbox, again_s: float, ended: Callable[[str], None]) -> None:
        self.out = out
        self.again_s = again_s
        self.ended = ended
        self.known: dict[str, bool] = {}  # address of the program's driver: whether it may be gone

    def watch(self, job: str) -> None:
        """The program owns something here."""
        if job not in self.known:
            self.known[job] = False
            self.out.send(job, Ping(0))

    def lost(self, peer: str, ended: bool) -> None:
        """The link to some process is lost; ended: for certain the process has."""
        if ended or self.known.get(peer):
            self.end(peer)
        elif peer in self.known:
            self.known[peer] = True
            self.out.timer(self.again_s, JobDoubted(peer))

    @on(JobDoubted)
    def _doubted(self, event: JobDoubted, now: float, sender: str) -> None:
        if self.known.get(event.job):
            self.out.send(event.job, Ping(0))

    @on(Pong)
    def _lives(self, event: Pong, now: float, sender: str) -> None:
        if sender in self.known:
            self.known[sender] = False

    def end(self, job: str) -> None:
        """The program has ended: what it owns goes."""
        if self.known.pop(job, None) is not None:
            self.ended(job)
