"""What Posts orders its shell to do with courses and pieces, and what the shell reports back."""

from __future__ import annotations

from flowengine.core.collective import Course
from flowengine.core.commands import Command
from flowengine.core.messages import Message, Record

PARTIAL, FINAL = 0, 1  # stages of a piece: folded in part, and the value
EARLY_S = 120.0  # pieces wait so long for a course that is not known yet: its ledger may be dead
HEAD_BYTES = 1024  # of a result before its array; with it the size of the object follows from that of the array


class Place(Record, frozen=True):
    """Where bytes of a step lie on this node: in a gift or result, or in scratch memory."""

    oid: bytes = b""
    offset: int = 0
    scratch: int = 0  # its number; 0: in the object


class Frame(Record, frozen=True):
    """A piece on its way from one post to another."""

    op: bytes
    epoch: int
    line: int
    piece: int
    stage: int
    source: int  # post
    target: int  # post
    nbytes: int


class PrepareCourse(Command, frozen=True):
    """Open what is given and make room for results; answered by CoursePrepared. Older epochs are stopped."""

    course: Course
    gifts: tuple[bytes, ...]  # objects
    made: tuple[tuple[bytes, int], ...]  # results to begin: (object, its bytes)
    kept: tuple[bytes, ...]  # whole or in part from earlier epochs; others of them are dropped


class AwaitCourse(Command, frozen=True):
    """The course has to wait for a gift: pieces of others come meanwhile, and are kept."""

    op: bytes
    epoch: int


class FoldPiece(Command, frozen=True):
    """Fold the sources, in this order, into the target, or copy the only one; answered by PieceFolded."""

    op: bytes
    epoch: int
    line: int
    piece: int
    stage: int
    post: int
    fold: str  # empty: there is one source, to be copied
    dtype: str
    sources: tuple[Place, ...]
    target: Place
    nbytes: int
    divide: int = 1  # the sum, by so much


class SendPiece(Command, frozen=True):
    """Send a piece to a node; answered by PieceSent, or by LaneBroken for all that was to go there."""

    to: str
    frame: Frame
    source: Place


class DropScratch(Command, frozen=True):
    """What lies there is not needed any more."""

    op: bytes
    scratch: int


class SealResult(Command, frozen=True):
    """The result is whole: let it be found as an object."""

    op: bytes
    oid: bytes


class StopCourse(Command, frozen=True):
    """Forget the pieces of the step that are under way, and those of this epoch that come; results stay."""

    op: bytes
    epoch: int


class EndCourse(Command, frozen=True):
    """Let go of all that the step holds, unsealed results too; what comes for it in this epoch is dropped."""

    op: bytes
    epoch: int


class CloseLane(Command, frozen=True):
    """The node is dead."""

    peer: str


class CoursePrepared(Message, frozen=True):
    """All is open; or why not (kind: gift, store)."""

    op: bytes
    epoch: int
    kind: str = ""
    reason: str = ""


class PieceCame(Message, frozen=True):
    """A piece is here: in the result of its target, or in this scratch memory."""

    frame: Frame
    scratch: int = 0


class PieceFolded(Message, frozen=True):
    """Folding has ended."""

    op: bytes
    epoch: int
    line: int
    piece: int
    stage: int
    post: int
    failure: str = ""
    kind: str = ""  # of the failure: gift, store


class PieceSent(Message, frozen=True):
    """The kernel has all of the piece."""

    to: str
    frame: Frame
    source: Place


class LaneBroken(Message, frozen=True):
    """Pieces to or from this node may be lost."""

    peer: str
    reason: str


class CourseWaits(Message, frozen=True):
    """A timer: a gift was not here yet."""

    op: bytes
    epoch: int
