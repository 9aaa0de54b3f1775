"""What a process with a session does itself with messages of its peers; all others are for its machines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowengine.core import messages as m
from flowengine.core.telling import known_after
from flowengine.runtime.drive import LAZY_S

if TYPE_CHECKING:
    from flowengine.runtime.context import Courses
    from flowengine.runtime.drive import Drive
    from flowengine.runtime.link import Endpoint
    from flowengine.runtime.membership import Membership
    from flowengine.runtime.sharing import Sharing
    from flowengine.runtime.values import Values


class Hearing:
    """Part of Session."""

    role: str
    node: str
    endpoint: Endpoint
    drive: Drive
    values: Values
    courses: Courses
    sharing: Sharing
    membership: Membership
    joined: concurrent.futures.Future[m.Welcome]
    nodes_seen: tuple[m.NodeEntry, ...]
    nodes_known: threading.Event
    log_sink: Callable[[m.LogLines], None] | None
    loop: asyncio.AbstractEventLoop
    kept_untold = False

    def welcomed(self, peer: str, message: m.Welcome) -> None:
        """The node takes us."""
        if not self.joined.done():
            self.joined.set_result(message)

    def space_given(self, peer: str, message: m.SpaceGiven) -> None:
        """The node answers whether an object fits."""
        self.values.space_given(message)

    def freed(self, peer: str, message: m.ObjectFreed) -> None:
        """Segments that this process wrote are not wanted any more; that they are warm is told with what comes next."""
        for oid, file in zip(message.oids, message.files, strict=True):
            self.endpoint.send(peer, m.SegmentKept(oid, self.values.segments.free(oid.hex(), file), file), False)
        if not self.kept_untold:
            self.kept_untold = True
            self.loop.call_later(LAZY_S, self._tell_kept)

    def _tell_kept(self) -> None:
        self.kept_untold = False
        self.endpoint.flush()

    def trim(self, peer: str, message: m.PoolTrimmed) -> None:
        """The node wants warm memory back."""
        self.endpoint.send(peer, m.PoolTrimmed(self.values.segments.trim(message.size_bytes)))

    def logged(self, peer: str, message: m.LogLines) -> None:
        """Lines of a worker."""
        if self.log_sink is not None:
            self.log_sink(message)
        elif self.role == "worker":
            self.endpoint.send(self.node, message)  # it knows for whom this process works

    def nodes_changed(self, peer: str, message: m.NodesChanged) -> None:
        """Who is there."""
        self.nodes_seen = known_after(self.nodes_seen, message)
        if message.whole:
            self.nodes_known.set()
        else:
            self.nodes_known.clear()
        self.drive.step(message, peer)
        self.courses.lost(message.dead, "the head declared it dead")

    def share_answered(self, peer: str, message: m.ShareAnswered) -> None:
        """The program answers about what it keeps for all."""
        self.sharing.answered(message)

    def share_told(self, peer: str, message: Any) -> None:
        """For programs only."""

    def course_told(self, peer: str, message: Any) -> None:
        """News of a course that code here has ordered."""
        self.courses.told(peer, message)

    def to_groups(self, peer: str, message: Any) -> None:
        """About groups in which this process has a seat, or for its machines."""
        if not self.membership.told(peer, message):
            self.drive.step(message, peer)

    def ping(self, peer: str, message: m.Ping) -> None:
        """Still here."""
        self.endpoint.send(peer, m.Pong(message.number))

    def chaos(self, peer: str, message: m.ChaosOrdered) -> None:
        """Failure laboratory: nothing to arm in a driver."""

    def at_point(self, point: str, what: bytes = b"") -> None:
        """A named point of the failure laboratory is passed; armed in workers only."""

    def goodbye(self, peer: str, message: m.Goodbye) -> None:
        """The peer ends on purpose; its link will tell."""


# By name, so that a worker's session can do more than a driver's.
SHELL: dict[type, str] = {
    m.Welcome: "welcomed",
    m.SpaceGiven: "space_given",
    m.ObjectFreed: "freed",
    m.PoolTrimmed: "trim",
    m.LogLines: "logged",
    m.NodesChanged: "nodes_changed",
    m.Asked: "answer",
    m.Answered: "answered",
    m.Ping: "ping",
    m.ChaosOrdered: "chaos",
    m.Goodbye: "goodbye",
    **dict.fromkeys((m.GroupFormed, m.JoinRefused, m.StepDone, m.StepFailed), "to_groups"),
    **dict.fromkeys((m.ObjectHere, m.ObjectMissing), "to_groups"),
    m.ShareAnswered: "share_answered",
    **dict.fromkeys((m.ShareAsked, m.ShareTaken, m.ShareGivenUp, m.ShareEnded), "share_told"),
    m.CourseDone: "course_told",
    m.CourseBroken: "course_told",
    m.Finals: "course_told",
}
