"""What programs keep for all of their code: locks, queues, events, variables; who is next, and who has died."""
from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowengine.core.commons import CHANGES_KEPT_MAX, Commons
from flowengine.core.messages import ShareAsked, ShareEnded, ShareGivenUp, ShareTaken


class Stage:
    """A program's books, and those who ask."""

    def __init__(self):
        self.commons = Commons()
        self.numbers = itertools.count(1)
        self.told = {}

    def hear(self, replies):
        for reply in replies:
            assert (reply.to, reply.number) not in self.told, "answered twice"
            self.told[reply.to, reply.number] = reply

    def ask(self, peer, kind, verb, items=(), **more):
        number = next(self.numbers)
        asked = ShareAsked(number, more.pop("name", "x"), kind, verb, **more)
        self.hear(self.commons.handle(asked, peer, items))
        return peer, number

    def say(self, peer, message):
        self.hear(self.commons.handle(message, peer))

    def word(self, asked):
        reply = self.told.get(asked)
        return reply.word if reply is not None else None

    def items(self, asked):
        return list(self.told[asked].items)


@pytest.fixture
def stage():
    return Stage()


def test_a_lock_goes_to_who_came_first_and_tokens_grow(stage):
    first, second, third = [stage.ask(peer, "lock", "acquire") for peer in "abc"]
    assert [stage.word(one) for one in (first, second, third)] == ["ok", None, None]
    token = stage.told[first].count
    stage.ask("a", "lock", "release", count=token)
    assert stage.word(second) == "ok"
    assert stage.told[second].count > token
    assert stage.word(third) is None


def test_who_does_not_wait_is_told_at_once(stage):
    stage.ask("a", "lock", "acquire")
    assert stage.word(stage.ask("b", "lock", "acquire", waits=False)) == "held"


def test_a_hold_ends_with_its_process_and_cannot_be_released_by_it_later(stage):
    first = stage.ask("a", "lock", "acquire")
    second = stage.ask("b", "lock", "acquire")
    stage.hear(stage.commons.lost("a"))
    assert stage.word(second) == "ok"
    late = stage.ask("a", "lock", "release", count=stage.told[first].count)
    other = stage.ask("a", "lock", "release", count=stage.told[second].count)
    assert stage.word(late) == stage.word(other) == "lost"
    assert stage.word(stage.ask("c", "lock", "acquire", waits=False)) == "held"


def test_a_hold_ends_with_its_task(stage):
    stage.ask("a", "lock", "acquire", code=b"task")
    second = stage.ask("a", "lock", "acquire", code=b"next")
    stage.say("a", ShareEnded(b"other"))
    assert stage.word(second) is None
    stage.say("a", ShareEnded(b"task"))
    assert stage.word(second) == "ok"


def test_a_waiter_that_dies_is_passed_over(stage):
    first = stage.ask("a", "lock", "acquire")
    dead, third = stage.ask("b", "lock", "acquire"), stage.ask("c", "lock", "acquire")
    stage.hear(stage.commons.lost("b"))
    stage.ask("a", "lock", "release", count=stage.told[first].count)
    assert stage.word(dead) is None
    assert stage.word(third) == "ok"


def test_a_lock_that_was_granted_while_its_waiter_was_interrupted_goes_back(stage):
    held = stage.ask("a", "lock", "acquire")
    second = stage.ask("b", "lock", "acquire")
    stage.say("a", ShareGivenUp(held[1], True))
    assert stage.word(second) == "ok"


def test_who_gives_up_is_told_once(stage):
    stage.ask("a", "lock", "acquire")
    second = stage.ask("b", "lock", "acquire")
    stage.say("b", ShareGivenUp(second[1]))
    stage.say("b", ShareGivenUp(second[1]))
    assert stage.word(second) == "late"


def test_a_semaphore(stage):
    asked = [stage.ask("a", "semaphore", "acquire", size=2) for _ in range(3)]
    assert [stage.word(one) for one in asked] == ["ok", "ok", None]
    assert stage.told[stage.ask("a", "semaphore", "count")].count == 2


@pytest.mark.parametrize(("kind", "size", "word"), [("queue", 5, "ok"), ("semaphore", 3, "size"),
                                                    ("semaphore", -1, "ok"), ("lock", -1, "ok")])
def test_a_name_of_a_kind_is_that_of_one_thing(stage, kind, size, word):
    stage.ask("a", "semaphore", "open", size=2)
    assert stage.word(stage.ask("b", kind, "open", size=size)) == word


def test_a_queue_is_in_order_and_bounded(stage):
    put = [stage.ask("a", "queue", "put", [item], size=2) for item in "xyz"]
    assert [stage.word(one) for one in put] == ["ok", "ok", None]
    assert stage.items(stage.ask("b", "queue", "get")) == ["x"]
    assert stage.word(put[2]) == "ok"
    assert stage.word(stage.ask("a", "queue", "put", ["v"], waits=False)) == "full"
    assert stage.items(stage.ask("b", "queue", "get", count=5)) == ["y", "z"]
    assert stage.word(stage.ask("b", "queue", "get", waits=False)) == "empty"
    assert stage.word(stage.ask("a", "queue", "put", ["1", "2", "3"])) == "never"


def test_a_large_batch_is_not_overtaken(stage):
    stage.ask("a", "queue", "put", ["x"], size=2)
    batch = stage.ask("a", "queue", "put", ["1", "2"])
    small = stage.ask("b", "queue", "put", ["y"])
    assert stage.word(batch) is None
    assert stage.word(small) is None
    stage.ask("c", "queue", "get")
    assert stage.word(batch) == "ok"
    assert stage.word(small) is None


def test_an_item_that_a_dead_process_did_not_take_goes_to_the_next_and_stays_in_order(stage):
    stage.ask("a", "queue", "put", ["x", "y", "z"])
    first, second = stage.ask("b", "queue", "get"), stage.ask("b", "queue", "get")
    stage.say("b", ShareTaken(second[1]))
    assert (stage.items(first), stage.items(second)) == (["x"], ["y"])
    stage.hear(stage.commons.lost("b"))
    assert stage.items(stage.ask("c", "queue", "get", count=9)) == ["x", "z"]


def test_an_item_whose_getter_was_interrupted_goes_to_who_waits(stage):
    stage.ask("a", "queue", "put", ["x"])
    first, second = stage.ask("b", "queue", "get"), stage.ask("c", "queue", "get")
    stage.say("b", ShareGivenUp(first[1], True))
    assert stage.items(second) == ["x"]


def test_a_queue_that_is_closed(stage):
    stage.ask("a", "queue", "put", ["x"], size=1)
    putter = stage.ask("a", "queue", "put", ["y"])
    stage.ask("a", "queue", "close")
    stage.ask("a", "queue", "close")
    assert stage.word(putter) == "closed"
    assert stage.word(stage.ask("a", "queue", "put", ["z"])) == "closed"
    assert stage.items(stage.ask("b", "queue", "get")) == ["x"]
    assert stage.word(stage.ask("b", "queue", "get")) == "closed"


def test_getters_of_a_queue_that_is_closed_are_told(stage):
    getter = stage.ask("b", "queue", "get")
    stage.ask("a", "queue", "close")
    assert stage.word(getter) == "closed"


def test_an_event(stage):
    waiting = [stage.ask(peer, "event", "wait") for peer in "ab"]
    assert stage.word(stage.ask("c", "event", "wait", waits=False)) == "unset"
    stage.ask("c", "event", "set")
    assert [stage.word(one) for one in waiting] == ["ok", "ok"]
    stage.ask("c", "event", "clear")
    assert stage.told[stage.ask("c", "event", "is_set")].count == 0


def test_a_variable(stage):
    waiting = stage.ask("a", "variable", "get")
    stage.ask("b", "variable", "set", ["v"])
    assert stage.items(waiting) == ["v"]
    assert stage.items(stage.ask("c", "variable", "get")) == ["v"]
    stage.ask("b", "variable", "delete")
    assert stage.word(stage.ask("c", "variable", "get", waits=False)) == "unset"


def test_a_change_with_a_key_is_made_once(stage):
    for _ in range(2):
        assert stage.word(stage.ask("a", "queue", "put", ["x"], key=b"k")) == "ok"
    stage.ask("a", "event", "set", name="e", key=b"s")
    stage.ask("b", "event", "clear", name="e", key=b"c")
    stage.ask("a", "event", "set", name="e", key=b"s")
    assert stage.told[stage.ask("a", "queue", "count")].count == 1
    assert stage.told[stage.ask("a", "event", "is_set", name="e")].count == 0


def test_a_change_that_was_given_up_may_be_made_later(stage):
    stage.ask("a", "queue", "put", ["x"], size=1)
    put = stage.ask("b", "queue", "put", ["y"], key=b"k")
    stage.hear(stage.commons.lost("b"))
    stage.ask("a", "queue", "get")
    assert stage.word(put) is None
    assert stage.word(stage.ask("c", "queue", "put", ["y"], key=b"k")) == "ok"
    assert stage.told[stage.ask("a", "queue", "count")].count == 1


def test_keys_are_bounded(stage):
    for number in range(CHANGES_KEPT_MAX + 5):
        stage.commons.changed(number.to_bytes(8, "big"))
    assert len(stage.commons.changes) == CHANGES_KEPT_MAX


@pytest.mark.parametrize("name", ["~unnamed", "named"])
def test_what_is_idle_is_not_kept(stage, name):
    entries = stage.commons.entries
    token = stage.told[stage.ask("a", "lock", "acquire", name=name)].count
    assert ("lock", name) in entries
    stage.ask("a", "lock", "release", name=name, count=token)
    stage.ask("a", "lock", "acquire", name=name, code=b"f")
    late = stage.ask("b", "lock", "acquire", name=name)
    assert stage.word(late) is None
    stage.say("a", ShareEnded(b"f"))
    stage.say("b", ShareGivenUp(late[1], True))
    stage.ask("a", "event", "set", name=name)
    assert stage.told[stage.ask("b", "event", "is_set", name=name)].count == 1
    stage.ask("a", "event", "clear", name=name)
    stage.ask("a", "variable", "set", ["x"], name=name)
    assert stage.items(stage.ask("b", "variable", "get", name=name)) == ["x"]
    stage.ask("a", "variable", "delete", name=name)
    waits = stage.ask("a", "variable", "get", name=name)
    assert ("variable", name) in entries
    stage.hear(stage.commons.lost(waits[0]))
    assert not entries


def test_a_queue_is_kept_while_it_has_items_or_gave_some_that_may_come_back(stage):
    stage.ask("a", "queue", "put", ["x"], name="~q", size=1)
    got = stage.ask("b", "queue", "get", name="~q", size=1)
    stage.hear(stage.commons.lost("b"))
    again = stage.ask("c", "queue", "get", name="~q", size=1)
    assert stage.items(got) == stage.items(again) == ["x"]
    stage.say("c", ShareTaken(again[1]))
    assert not stage.commons.entries
    stage.ask("a", "queue", "close", name="~q", size=1)
    assert stage.word(stage.ask("b", "queue", "get", name="~q", size=1)) == "closed"
    stage.ask("a", "queue", "open", name="named", size=2)
    assert stage.word(stage.ask("a", "queue", "open", name="named", size=3)) == "size"


def test_what_one_waits_for_is_told(stage):
    stage.ask("a", "lock", "acquire", who="task f 12ab")
    number = stage.ask("b", "lock", "acquire", code=b"g")[1]
    assert "lock 'x', which task f 12ab holds" in stage.commons.why("b", number)
    assert stage.commons.waits_of(b"g") == [stage.commons.why("b", number)]
    assert stage.commons.why("b", 99) == ""
    assert stage.commons.waits_of(b"h") == []
    stage.ask("c", "event", "wait", name="e", code=b"actor", call=b"h", root=b"actor")
    assert stage.commons.waits_of(b"h") == stage.commons.waits_of(b"actor") == ["event 'e', which nobody has set"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "get", "take", "die", "stop"])), max_size=60))
def test_items_are_neither_lost_nor_doubled(steps):
    """Every item that was put is in the queue, on its way, or was taken once; and they come out in order."""
    stage, count, under_way, taken = Stage(), 0, [], []
    for peer, step in steps:
        if step == "put":
            count += 1
            stage.ask(peer, "queue", "put", [count])
        elif step == "get":
            under_way.append(stage.ask(peer, "queue", "get"))
        elif step == "die":
            stage.hear(stage.commons.lost(peer))
            under_way = [asked for asked in under_way if asked[0] != peer]
        elif step == "stop":
            for asked in [asked for asked in under_way if asked[0] == peer]:
                stage.say(peer, ShareGivenUp(asked[1], True))
                under_way.remove(asked)
        else:
            for asked in [asked for asked in under_way if asked[0] == peer and asked in stage.told]:
                stage.say(peer, ShareTaken(asked[1]))
                taken += stage.items(asked)
                under_way.remove(asked)
    on_the_way = [item for asked in under_way if asked in stage.told for item in stage.items(asked)]
    left = [item for _, item in stage.commons.entries["queue", "x"].items] if stage.commons.entries else []
    assert sorted([*taken, *on_the_way, *left]) == list(range(1, count + 1))
    assert left == sorted(left)
    waiting = [asked for asked in under_way if asked not in stage.told]
    assert not (waiting and left), "somebody waits though an item is there"


STEPS = ["acquire", "release", "die", "stop"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(STEPS)), max_size=60))
def test_a_lock_has_one_holder_at_a_time(steps):
    stage, held, waiting, last = Stage(), {}, [], 0
    for peer, step in steps:
        if step == "acquire":
            waiting.append(stage.ask(peer, "lock", "acquire"))
        elif step == "release" and peer in held:
            assert stage.word(stage.ask(peer, "lock", "release", count=held.pop(peer))) == "ok"
        elif step in ("die", "stop"):
            if step == "die":
                stage.hear(stage.commons.lost(peer))
                held.pop(peer, None)
            else:
                for asked in [asked for asked in waiting if asked[0] == peer]:
                    stage.say(peer, ShareGivenUp(asked[1], True))
            waiting = [asked for asked in waiting if asked[0] != peer]
        for asked in [asked for asked in waiting if asked in stage.told]:
            assert not held, "two holders"
            held[asked[0]] = stage.told[asked].count
            assert held[asked[0]] > last, "a token that is not larger"
            last = held[asked[0]]
            waiting.remove(asked)
    assert held or not waiting, "it is free, and somebody waits"


def test_what_nobody_has_a_handle_of_goes_with_what_it_holds_unless_somebody_waits(stage):
    stage.ask("a", "queue", "put", ["one"], name="~q")
    assert stage.commons.forget("queue", "~q")
    assert not stage.commons.entries
    waiting = stage.ask("a", "queue", "get", name="~q", count=1, waits=True)
    assert not stage.commons.forget("queue", "~q")
    stage.ask("b", "queue", "put", ["two"], name="~q")
    assert stage.items(waiting) == ["two"]
    assert stage.commons.forget("queue", "~never")
