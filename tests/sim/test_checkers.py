"""What the checkers say of histories of an actor, as a table: (who read what and when, who died when, complaints)."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

from flowengine.chaos.checkers import wrong_actors
from flowengine.chaos.sim_actors import ActorBook, Look, MadeCall, Reply, digest_of

ACTOR, LIFE, TASK = b"actor", b"actor1.0", b"task"
A, B = b"call a", b"call b"


def look(history: str, reader: str, at_s: float, call: bytes = b"") -> Look:
    done = tuple({"a": A, "b": B}[letter] for letter in history)
    return Look(LIFE, call or b"look at %.1f" % at_s, done, reader, at_s)


CASES = {
    "all is done": ([look("ab", "driver", 2.0)], {}, []),
    "a call is missing": ([look("a", "driver", 2.0)], {}, [f"call {B.hex()} was never done"]),
    "a call came back at another place": (
        [look("ab", "driver", 1.0), look("ba", "driver", 2.0)], {},
        ["somebody read 2 calls that are not a beginning of its history",
         f"call {A.hex()} was told place 0, it has 1"],
    ),
    "a caller runs again and reads what was read before": (
        [look("a", "w1", 1.0, b"look"), look("ab", "driver", 2.0), look("a", "w2", 3.0, b"look")], {}, [],
    ),
    "and the first that read it is dead": (
        [look("a", "w1", 1.0, b"look"), look("ab", "driver", 2.0), look("a", "w2", 3.0, b"look")], {"w1": 1.1}, [],
    ),
    "a call is undone": (
        [look("ab", "driver", 2.0), look("a", "driver", 3.0)], {},
        ["somebody read 2 calls that are not a beginning of its history"],
    ),
    "who read it last died when its task had ended": (
        [look("", "w1", 1.0), look("ab", "w2", 2.0)], {"w2": 2.1}, [],
    ),
    "who read it last died, and had read too little": (
        [look("", "w1", 1.0), look("a", "w2", 2.0)], {"w2": 2.1}, [f"call {B.hex()} was never done"],
    ),
    "who read it died before it told of that": ([look("b", "w1", 1.0), look("ab", "w2", 2.0)], {"w1": 1.1}, []),
    "it told of it, and the history is another now": (
        [look("b", "w1", 1.0), look("ab", "w2", 2.0)], {"w1": 1.9},
        ["somebody read 1 calls that are not a beginning of its history"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_wrong_actors(case):
    looks, deaths, complaints = CASES[case]
    book = ActorBook()
    book.made = {A: MadeCall(ACTOR, TASK, TASK, 0, True), B: MadeCall(ACTOR, b"other", b"other", 0, True)}
    book.lives = {ACTOR: [LIFE]}
    book.replies = [Reply(LIFE, A, 0, digest_of([A]), "driver", 0.5)]
    times = [(one.at_s, one) for one in looks] + [(at_s, reader) for reader, at_s in deaths.items()]
    for at_s, what in sorted(times, key=lambda entry: entry[0]):
        if isinstance(what, str):
            book.died(what, at_s)
        else:
            book.look(what)
    world = SimpleNamespace(actors=book, driver=SimpleNamespace(outcome=1))
    assert wrong_actors(world) == [f"actor {ACTOR.hex()}: {line}" for line in complaints]
