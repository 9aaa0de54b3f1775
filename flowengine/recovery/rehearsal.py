"""Locks, queues, events and variables in a replay: what the record has is given back, the rest happens here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from flowengine.core import messages as m
from flowengine.core.commons import Commons
from flowengine.errors import FlowError
from flowengine.objects import codec
from flowengine.runtime.sharing import Pending, Sharing

if TYPE_CHECKING:
    from flowengine.recovery.stage import Stage
    from flowengine.runtime.session import Session

OF_OTHERS = ("acquire", "put", "wait")  # waits that ended when somebody else went on


class Rehearsal(Sharing):
    """Of a stage: nobody outside of the replay sees what it does."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(cast("Session", stage))
        self.stage = stage
        self.machine = Commons()

    def say(self, message: Any) -> None:
        """To books of its own."""
        items = message.items if type(message) is m.ShareAsked else ()
        for reply in self.machine.handle(message, self.stage.address, items):
            self.answered(m.ShareAnswered(reply.number, reply.word, reply.count, tuple(reply.items), reply.text))

    def key(self, change: str, items: Sequence[m.SharedItem]) -> bytes:
        """Nothing is done twice here; the children of the code keep their places."""
        self.stage.new_child()
        return b""

    def new_name(self) -> str:
        """As the code got it when it ran."""
        return self.stage.new_child().hex()

    def await_answer(self, pending: Pending, limit_s: float | None) -> None:
        """What is not there will not come: others are taken to have done what they did then."""
        if pending.answer is None and pending.verb in OF_OTHERS:
            self.answered(m.ShareAnswered(pending.number, "ok"))
        elif pending.answer is None and limit_s is None:
            raise FlowError("the code waits for others, who do not run in a replay, and the record has no answer; what "
                            "a task only looks at is in its record when it says flow.record(variable.get)")
        elif pending.answer is None:
            self.say(m.ShareGivenUp(pending.number))

    async def await_on_loop(self, pending: Pending, limit_s: float | None) -> None:
        """The same."""
        self.await_answer(pending, limit_s)

    def recorded(self, takes: bool) -> tuple[int, bytes | None]:
        """The answer that the code got then."""
        return -1, self.stage.choice("share") if takes or self.stage.is_actor else None

    def is_repeated(self) -> bool:
        """Its locks are its own."""
        return False

    def packed(self, value: Any) -> m.SharedItem:
        """A value, whatever its size."""
        return m.SharedItem(codec.to_inline(codec.pack(value)))
