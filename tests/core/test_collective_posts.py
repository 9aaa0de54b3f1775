"""A node's side of a step, event by event: what it orders, keeps, tells and lets go of."""
from __future__ import annotations

import pytest

from flowengine.collectives import posts_orders as o
from flowengine.collectives import posts_pieces
from flowengine.collectives.plan import result_name
from flowengine.config import Config
from flowengine.core import collective as co
from flowengine.core import messages as m
from flowengine.core.commands import RemoveObject, Send, SetTimer
from flowengine.core.invariants import check
from flowengine.core.node import Node
from flowengine.core.node_desk import NodeSettings

ME, LEFT, RIGHT, LEDGER, MEMBER = "me", "left", "right", "ledger", "member"
GROUP, OP, STEP = b"g" * 16, b"o" * 16, (-1, -1, 0)
GIFT, RESULT = b"i" * 16, result_name(GROUP, STEP, -1)
PIECE = 1024


class Stage:
    """A node machine; it hears what it says to itself, and its shell opens everything."""

    def __init__(self, **limits):
        limits = {"collective_kept_bytes_max": 1 << 20, **limits}
        self.node = Node(NodeSettings(
            me=ME, node_id="n", host="h", total=(), num_workers=0, store_folder="f", store_limit_bytes=1 << 22,
            session="s", head="head"), Config(**limits))
        self.now = 0.0
        self.orders, self.said, self.timers = [], [], []

    @property
    def posts(self):
        return self.node.posts

    def hear(self, event, sender=""):
        waiting = [(event, sender)]
        for event, sender in waiting:
            for order in self.node.handle(event, self.now, sender):
                if isinstance(order, Send) and order.to == ME:
                    waiting.append((order.message, ME))
                elif isinstance(order, Send):
                    self.said.append((order.to, order.message))
                elif isinstance(order, SetTimer):
                    self.timers.append(order.event)
                elif isinstance(order, RemoveObject) and order.writer == ME:
                    waiting.append((m.SegmentKept(order.oid, 4096), ME))
                else:
                    self.orders.append(order)
        assert check(self.node) == []

    def give(self, oid=GIFT, nbytes=8 * PIECE):
        self.hear(m.SpaceAsked(1, nbytes), MEMBER)
        self.hear(m.ObjectSealed(oid, nbytes, ME), MEMBER)

    def begin(self, course, sender=LEDGER):
        self.hear(course, sender)
        assert self.take(o.PrepareCourse)
        self.hear(o.CoursePrepared(course.op, course.epoch))

    def take(self, kind):
        """The orders of a kind since the last look."""
        found = [order for order in self.orders if type(order) is kind]
        self.orders = [order for order in self.orders if type(order) is not kind]
        return found

    def told(self, kind):
        return [(to, message) for to, message in self.said if type(message) is kind]

    def partial(self, piece, scratch, line=0, source=0, target=1):
        self.hear(o.PieceCame(o.Frame(OP, 1, line, piece, o.PARTIAL, source, target, PIECE), scratch))

    def final(self, piece, line=0, source=0, target=1, scratch=0):
        self.hear(o.PieceCame(o.Frame(OP, 1, line, piece, o.FINAL, source, target, PIECE), scratch))

    def fold(self, order, failure="", kind=""):
        self.hear(o.PieceFolded(order.op, order.epoch, order.line, order.piece, order.stage, order.post, failure, kind))

    def sent(self, order):
        self.hear(o.PieceSent(order.to, order.frame, order.source))


def post(node, gives=True, result=False, pieces=4, takers=()):
    given = ((0, GIFT),) if gives else ()
    return co.Post(node, given, RESULT if result else b"", pieces * PIECE if result else 0, tuple(takers))


def line(pieces=4, root=2, folds=(), spreads=(), at=0):
    return co.Line(at * PIECE, at * PIECE, pieces * PIECE, PIECE, "<f4", root, tuple(folds), tuple(spreads))


def course_of(posts, lines, **given):
    return co.Course(**{"op": OP, "group": GROUP, "step": STEP, "epoch": 1, "fold": "sum", "count": 3,
                        "posts": tuple(posts), "lines": tuple(lines), **given})


def alone(pieces=4, **given):
    """This node folds what its members give."""
    mine = co.Post(ME, ((0, GIFT), (1, GIFT)), RESULT, pieces * PIECE, ((0, "p0"), (1, "p1")))
    whole = co.Line(0, 0, pieces * PIECE, pieces * PIECE, "<f4", 0)
    return course_of([mine], [whole], **given)


def middle(**given):
    return course_of([post(LEFT), post(ME), post(RIGHT)], [line(folds=((0, 1), (1, 2)))], **given)


def whole_step(stage, course=None):
    """A step of this node alone, from gift to result."""
    course = course or alone()
    stage.give()
    stage.begin(course)
    for order in stage.take(o.FoldPiece):
        stage.fold(order)
    return course


# --- who comes late -------------------------------------------------------------------------------


def awaiting():
    """A course under way whose gift of this node is on its way."""
    stage = Stage()
    stage.hear(middle(awaited=(GIFT,)), LEDGER)
    assert stage.take(o.AwaitCourse) == [o.AwaitCourse(OP, 1)]
    stage.now = 100.0
    return stage


def test_a_gift_that_is_awaited_is_not_asked_for_before_its_member_has_come():
    stage = awaiting()
    assert not [event for event in stage.timers if type(event) is o.CourseWaits]
    stage.give()
    assert not stage.take(o.PrepareCourse)
    stage.hear(co.GiftCame(OP, 1, GIFT), LEDGER)
    assert stage.take(o.PrepareCourse)[0].gifts == (GIFT,)


def test_that_a_member_has_come_may_be_told_before_its_gift():
    stage = awaiting()
    stage.hear(co.GiftCame(OP, 1, GIFT), LEDGER)
    waits = stage.timers[-1]
    assert type(waits) is o.CourseWaits
    stage.give()
    stage.hear(waits)
    assert stage.take(o.PrepareCourse)
    assert not stage.told(co.CourseBroken)


def test_what_was_given_to_a_step_that_is_over_goes_when_the_store_hears_of_it_later():
    stage = awaiting()
    stage.hear(co.GiftCame(OP, 1, GIFT), LEDGER)
    stage.hear(co.StepEnded(OP), LEDGER)  # it failed
    stage.give()
    assert not stage.node.store.entries


def test_that_a_member_has_come_is_nothing_to_a_later_course():
    stage = awaiting()
    stage.hear(middle(epoch=2, awaited=(GIFT,)), LEDGER)
    stage.hear(co.GiftCame(OP, 1, GIFT), LEDGER)
    stage.give()
    assert not stage.take(o.PrepareCourse)
    stage.hear(co.GiftCame(OP, 2, GIFT), LEDGER)
    assert stage.take(o.PrepareCourse)


# --- pieces ---------------------------------------------------------------------------------------


def test_a_node_alone_folds_whole_lines_and_tells_all():
    stage = Stage()
    stage.give()
    stage.begin(alone())
    (fold,) = stage.take(o.FoldPiece)
    assert fold.sources == (o.Place(GIFT), o.Place(GIFT))
    assert fold.target == o.Place(RESULT)
    assert fold.nbytes == 4 * PIECE
    assert fold.fold == "sum"
    assert fold.divide == 1
    assert not stage.told(co.StepDone)
    stage.fold(fold)
    assert stage.take(o.SealResult) == [o.SealResult(OP, RESULT)]
    nbytes = 4 * PIECE + o.HEAD_BYTES
    assert stage.told(co.StepDone) == [
        (f"p{rank}", co.StepDone(GROUP, STEP, b"", RESULT, nbytes, (ME,), rank=rank)) for rank in (0, 1)]
    assert stage.told(co.CourseDone) == [(LEDGER, co.CourseDone(OP, 1))]
    assert stage.node.store.entries[RESULT].owners == {ME: None}


def test_the_root_divides_by_the_number_of_ranks():
    stage = Stage()
    stage.give()
    stage.begin(alone(fold="mean", count=2))
    assert stage.take(o.FoldPiece)[0].divide == 2


def test_what_comes_is_folded_in_place_and_sent_on():
    stage = Stage()
    stage.give()
    stage.begin(middle())
    assert not stage.orders  # nothing begins here
    stage.partial(2, -7)
    (fold,) = stage.take(o.FoldPiece)
    assert fold.sources == (o.Place(scratch=-7), o.Place(GIFT, 2 * PIECE))
    assert fold.target == o.Place(scratch=-7)
    stage.fold(fold)
    (send,) = stage.take(o.SendPiece)
    assert send == o.SendPiece(RIGHT, o.Frame(OP, 1, 0, 2, o.PARTIAL, 1, 2, PIECE), o.Place(scratch=-7))
    assert not stage.take(o.DropScratch)
    stage.sent(send)
    assert stage.take(o.DropScratch) == [o.DropScratch(OP, -7)]
    assert not stage.told(co.CourseDone)


def test_a_post_folds_its_own_after_the_first_that_comes_and_waits_for_all():
    stage = Stage()
    stage.give()
    stage.begin(course_of([post(LEFT), post(RIGHT), post(ME, result=True)], [line(root=2, folds=((0, 2), (1, 2)))]))
    stage.partial(0, -1, source=1, target=2)
    assert not stage.take(o.FoldPiece)
    stage.partial(0, -2, source=0, target=2)
    (fold,) = stage.take(o.FoldPiece)
    assert fold.sources == (o.Place(scratch=-2), o.Place(GIFT), o.Place(scratch=-1))
    assert fold.target == o.Place(RESULT)
    stage.fold(fold)
    assert sorted(order.scratch for order in stage.take(o.DropScratch)) == [-2, -1]


def test_only_so_many_of_its_own_pieces_are_under_way():
    stage = Stage()
    stage.give(nbytes=64 * PIECE)
    stage.begin(course_of([post(ME), post(RIGHT)], [line(64, root=1, folds=((0, 1),))]))
    sends = stage.take(o.SendPiece)
    assert [send.frame.piece for send in sends] == list(range(posts_pieces.LANE_PIECES_MAX))
    (stop,) = stage.posts.works[OP].stops.values()
    assert stop.under_way == posts_pieces.OWN_PIECES_MAX
    assert all(send.source.oid == GIFT for send in sends)  # straight from what was given
    done = 0
    while sends:
        stage.sent(sends.pop(0))
        done += 1
        sends += stage.take(o.SendPiece)
    assert done == 64
    assert stage.told(co.CourseDone)


def test_whole_pieces_go_before_those_in_part_and_those_before_its_own():
    stage = Stage()
    stage.give(nbytes=64 * PIECE)
    stage.begin(course_of(
        [post(LEFT, result=True), post(ME, result=True, pieces=48), post(RIGHT, result=True)],
        [line(16, root=0, folds=((1, 2), (2, 0)), at=0),
         line(16, root=2, folds=((0, 1), (1, 2)), at=16),
         line(16, root=0, spreads=((0, 1), (1, 2)), at=32)]))
    first = stage.take(o.SendPiece)
    assert {send.frame.line for send in first} == {0}
    stage.partial(0, -1, line=1)
    stage.fold(stage.take(o.FoldPiece)[0])
    stage.final(0, line=2)
    for send in first[:2]:
        stage.sent(send)
    assert [send.frame.line for send in stage.take(o.SendPiece)] == [2, 1]


def test_the_source_of_a_broadcast_sends_what_was_given_while_it_copies():
    stage = Stage()
    stage.give()
    stage.begin(course_of([post(ME, result=True), post(RIGHT, False, True)], [line(1, root=0, spreads=((0, 1),))],
                          fold=""))
    (send,), (copy,) = stage.take(o.SendPiece), stage.take(o.FoldPiece)
    assert send.frame.stage == o.FINAL
    assert send.source == o.Place(GIFT)
    assert copy.fold == ""
    assert copy.sources == (o.Place(GIFT),)
    assert copy.target == o.Place(RESULT)


def test_a_post_without_a_result_passes_whole_pieces_on_from_scratch():
    stage = Stage()
    stage.begin(course_of([post(LEFT), post(ME, False), post(RIGHT, False, True), post("far", False, True)],
                          [line(1, root=0, spreads=((0, 1), (1, 2), (1, 3)))], fold=""))
    stage.final(0, scratch=-3)
    sends = stage.take(o.SendPiece)
    assert [send.to for send in sends] == [RIGHT, "far"]
    assert {send.source.scratch for send in sends} == {-3}
    stage.sent(sends[0])
    assert not stage.take(o.DropScratch)
    stage.sent(sends[1])
    assert stage.take(o.DropScratch) == [o.DropScratch(OP, -3)]


def test_posts_of_one_node_pass_pieces_to_each_other():
    stage = Stage()
    other = result_name(GROUP, STEP, 1)
    stage.give()
    stage.begin(course_of(
        [post(ME), post(ME, result=True), co.Post(ME, (), other, PIECE, ((1, "p1"),))],
        [line(1, root=1, folds=((0, 1),), spreads=((1, 2),))]))
    (fold,) = stage.take(o.FoldPiece)
    assert fold.sources == (o.Place(GIFT), o.Place(GIFT))
    stage.fold(fold)
    (copy,) = stage.take(o.FoldPiece)
    assert copy.sources == (o.Place(RESULT),)
    assert copy.target == o.Place(other)
    stage.fold(copy)
    assert len(stage.told(co.StepDone)) == 1
    assert stage.told(co.CourseDone)
    assert not stage.take(o.SendPiece)


# --- beginning ------------------------------------------------------------------------------------


def test_a_gift_that_the_store_does_not_know_yet_is_waited_for():
    stage = Stage()
    stage.hear(alone(), LEDGER)
    assert not stage.take(o.PrepareCourse)
    stage.give()
    stage.hear(stage.timers.pop())
    assert stage.take(o.PrepareCourse)


def test_a_gift_that_does_not_come_breaks_the_course():
    stage = Stage()
    stage.hear(alone(), LEDGER)
    stage.now = 100.0
    stage.hear(stage.timers.pop())
    ((to, told),) = stage.told(co.CourseBroken)
    assert to == LEDGER
    assert told.kind == "gift"
    assert GIFT.hex() in told.reason


def test_no_room_breaks_the_course():
    stage = Stage()
    stage.give()
    stage.hear(alone(pieces=8192), LEDGER)
    assert [told.kind for _, told in stage.told(co.CourseBroken)] == ["store"]


@pytest.mark.parametrize("gift_bytes", [1 << 21, 1 << 22])
def test_what_can_never_be_in_memory_at_once_breaks_the_course(gift_bytes):
    """Else one gift would be brought back in place of another, again and again."""
    stage = Stage()
    stage.give(nbytes=gift_bytes)
    stage.hear(alone(pieces=1 << 11), LEDGER)
    assert not stage.take(o.PrepareCourse)
    ((_, told),) = stage.told(co.CourseBroken)
    assert told.kind == "store"
    assert "the limit of the store is 4.0 MiB" in told.reason
    stage.hear(co.StepEnded(OP), LEDGER)
    assert not stage.node.store.granted_bytes


def test_what_the_shell_cannot_open_breaks_the_course_and_gives_its_room_back():
    stage = Stage()
    stage.give()
    stage.hear(alone(), LEDGER)
    stage.hear(o.CoursePrepared(OP, 1, "gift", "it is no array"))
    assert stage.told(co.CourseBroken)[0][1].reason == "it is no array"
    assert stage.node.store.granted == {}


@pytest.mark.parametrize("kind", ["gift", "store"])
def test_a_fold_that_fails_breaks_the_course_as_it_says(kind):
    stage = Stage()
    stage.give()
    stage.begin(alone())
    stage.fold(stage.take(o.FoldPiece)[0], "why", kind)
    ((_, told),) = stage.told(co.CourseBroken)
    assert (told.kind, told.reason) == (kind, "why")


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_older_course_changes_nothing(epoch):
    stage = Stage()
    stage.give()
    stage.begin(alone())
    stage.hear(alone(epoch=epoch), LEDGER)
    assert not stage.take(o.PrepareCourse)


# --- breaking and repair --------------------------------------------------------------------------


def test_a_broken_lane_is_told_once():
    stage = Stage()
    stage.give()
    stage.begin(middle())
    stage.hear(o.LaneBroken(RIGHT, "cut"))
    stage.hear(o.LaneBroken(LEFT, "cut too"))
    assert stage.told(co.CourseBroken) == [(LEDGER, co.CourseBroken(OP, 1, "peer", RIGHT, "cut"))]


def test_a_dead_node_breaks_what_it_takes_part_in():
    stage = Stage()
    stage.give()
    stage.begin(middle())
    stage.hear(m.NodesChanged((), (RIGHT,)), "head")
    assert stage.take(o.CloseLane) == [o.CloseLane(RIGHT)]
    assert stage.told(co.CourseBroken)[0][1].peer == RIGHT


def spread_to_me(epoch=1, pieces=4, at=0, fresh=True):
    return course_of([post(LEFT), post(ME, False, True, takers=[(0, "p0")])],
                     [line(pieces, root=0, spreads=((0, 1),), at=at)], fold="", epoch=epoch, fresh=fresh)


def test_a_repair_keeps_what_is_whole():
    stage = Stage()
    stage.begin(spread_to_me())
    for piece in (0, 2, 1):
        stage.final(piece)
    stage.hear(co.FinalsAsked(OP, 2), "ledger2")
    assert stage.take(o.StopCourse) == [o.StopCourse(OP, 1)]
    assert stage.told(co.Finals) == [("ledger2", co.Finals(OP, 2, ((RESULT, ((0, 3 * PIECE),)),)))]
    stage.final(3)  # of the course that was stopped
    assert not stage.told(co.StepDone)
    stage.hear(spread_to_me(3, 1, 3, fresh=False), "ledger2")
    (order,) = stage.take(o.PrepareCourse)
    assert order.made == ()
    assert order.kept == (RESULT,)
    stage.hear(o.CoursePrepared(OP, 3))
    stage.hear(o.PieceCame(o.Frame(OP, 3, 0, 0, o.FINAL, 0, 1, PIECE)))
    assert [to for to, _ in stage.told(co.StepDone)] == ["p0"]
    assert stage.told(co.CourseDone) == [("ledger2", co.CourseDone(OP, 3))]


def test_a_root_that_has_the_bytes_spreads_them_without_what_was_given():
    stage = Stage()
    stage.begin(spread_to_me())
    stage.final(0)
    stage.hear(co.FinalsAsked(OP, 2), LEDGER)
    again = course_of([post(ME, True, True, takers=[(0, "p0")]), post(RIGHT, False, True)],
                      [line(1, root=0, spreads=((0, 1),))], epoch=2, fresh=False)
    stage.hear(again, LEDGER)
    assert stage.take(o.PrepareCourse)[0].gifts == ()
    stage.hear(o.CoursePrepared(OP, 2))
    (send,) = stage.take(o.SendPiece)
    assert send.source == o.Place(RESULT)
    assert not stage.take(o.FoldPiece)
    assert stage.node.counters["bytes_sent_again"] == PIECE


def test_a_fresh_course_begins_with_nothing():
    stage = Stage()
    stage.begin(spread_to_me())
    stage.final(0)
    stage.hear(spread_to_me(2), LEDGER)
    (order,) = stage.take(o.PrepareCourse)
    assert order.kept == ()
    assert [oid for oid, _ in order.made] == [RESULT]
    assert stage.node.store.granted == {ME: 4 * PIECE + o.HEAD_BYTES}


# --- keeping and letting go -----------------------------------------------------------------------


def test_gifts_go_with_the_step_and_results_when_nobody_repeats_it():
    stage = Stage()
    whole_step(stage)
    stage.hear(co.StepEnded(OP), LEDGER)
    assert stage.take(o.EndCourse) == [o.EndCourse(OP, 1)]
    assert list(stage.node.store.entries) == [RESULT]
    stage.hear(co.HeldAsked(GROUP), "ledger2")
    nbytes = 4 * PIECE + o.HEAD_BYTES
    held = co.HeldStep(STEP, ((-1, RESULT, nbytes),), (), ())
    assert stage.told(co.Held) == [("ledger2", co.Held(GROUP, (held,), 1))]
    stage.hear(co.StepsForgotten(GROUP, 1), LEDGER)
    assert not stage.node.store.entries
    assert stage.node.store.pools == {ME: 4096}


def test_gifts_that_may_be_needed_again_stay():
    stage = Stage()
    whole_step(stage, alone(keeps_gifts=True))
    stage.hear(co.StepEnded(OP), LEDGER)
    assert set(stage.node.store.entries) == {GIFT, RESULT}
    stage.hear(co.StepsForgotten(GROUP, -1), LEDGER)
    assert not stage.node.store.entries
    assert not stage.posts.kept.groups


def test_gifts_that_were_kept_are_there_for_a_course_that_does_the_step_anew():
    stage = Stage()
    whole_step(stage, alone(keeps_gifts=True))
    stage.hear(co.StepEnded(OP), LEDGER)
    stage.hear(alone(keeps_gifts=True, epoch=2), "ledger2")
    assert stage.take(o.PrepareCourse)[0].gifts == (GIFT,)
    assert GIFT in stage.node.store.entries


def test_a_new_ledger_hears_what_was_given_to_steps_whose_results_are_of_one_rank_each():
    stage = Stage()
    headers = ((0, co.Header("reduce_scatter", "sum")), (1, co.Header("reduce_scatter", "sum")))
    course = alone(keeps_gifts=True, headers=headers)
    stage.give()
    stage.begin(course)
    stage.hear(co.HeldAsked(GROUP), "ledger2")
    gifts = ((0, GIFT, b""), (1, GIFT, b""))
    held = co.HeldStep(STEP, (), (), (), headers=headers, gifts=gifts)
    assert stage.told(co.Held) == [("ledger2", co.Held(GROUP, (held,), 1))]
    for order in stage.take(o.FoldPiece):
        stage.fold(order)
    stage.hear(co.StepEnded(OP), LEDGER)
    stage.hear(co.HeldAsked(GROUP), "ledger2")
    [held] = stage.told(co.Held)[-1][1].steps
    assert held.objects
    assert (held.headers, held.gifts) == (headers, gifts)


def test_a_step_that_failed_leaves_no_half_result():
    stage = Stage()
    stage.give()
    stage.begin(alone())
    stage.hear(co.BlobsReady(OP, GROUP, STEP, (), (), failed=("timeout", "too late")), LEDGER)
    stage.hear(co.StepEnded(OP), LEDGER)
    assert not stage.node.store.entries
    assert not stage.node.store.granted
    assert stage.posts.kept.held(GROUP).steps[0].failed == ("timeout", "too late")


def test_a_result_of_somebody_else_is_not_kept():
    stage = Stage()
    whole_step(stage, alone(owner=MEMBER))
    stage.hear(co.StepEnded(OP), LEDGER)
    assert stage.node.store.entries[RESULT].owners == {MEMBER: None}
    assert GIFT in stage.node.store.entries
    assert stage.posts.kept.held(GROUP).steps == ()


def test_blobs_are_kept_and_handed_out():
    stage = Stage()
    header = co.Header("scatter")
    layout = (co.Layout(0, header, 0), co.Layout(0, header, 1))
    ready = co.BlobsReady(OP, GROUP, STEP, ((0, b"a"), (1, b"b")), ((0, "p0"), (1, "p1"), (2, "p2")), layout)
    stage.hear(ready, LEDGER)
    done = [told for _, told in stage.told(co.StepDone)]
    assert [told.blob for told in done] == [b"a", b"b", b""]
    assert done[2].empty
    assert [told.layout for told in done] == [(layout[0],), (layout[1],), ()]
    assert stage.posts.kept.held(GROUP).steps[0].blobs == ((0, b"a"), (1, b"b"))


def test_members_are_told_when_much_is_kept_and_a_new_ledger_what_is_forgotten():
    stage = Stage(collective_kept_bytes_max=10)
    for number in range(3):
        stage.hear(co.BlobsReady(bytes([number] * 16), GROUP, (-1, -1, number), ((-1, b"blob"),), ((0, "p"),)), LEDGER)
    assert [step.step[2] for step in stage.posts.kept.held(GROUP).steps] == [0, 1, 2]
    stage.hear(co.StepsForgotten(GROUP, 2), LEDGER)
    assert stage.posts.kept.held(GROUP).floor == 2
    assert [told.checkpoint for _, told in stage.told(co.StepDone)] == [False, True, True]


def test_copies_of_a_result_go_with_it():
    stage = Stage()
    whole_step(stage)
    stage.hear(co.StepEnded(OP), LEDGER)
    stage.hear(m.CopyAdded(RESULT, RIGHT), RIGHT)
    stage.hear(co.StepsForgotten(GROUP, 1), LEDGER)
    assert (RIGHT, m.ObjectFreed((RESULT,))) in stage.said


def test_what_a_dead_member_gave_waits_for_its_step_but_not_for_ever():
    stage = Stage()
    stage.give()
    stage.hear(m.CopyAdded(GIFT, ME, True), ME)
    stage.now = 10_000.0
    stage.hear(co.StepsForgotten(b"another", 3), LEDGER)
    assert not stage.node.store.entries


def test_a_new_life_of_the_node_leaves_nothing():
    stage = Stage()
    whole_step(stage)
    stage.hear(spread_to_me(), LEDGER)
    stage.hear(m.NodeFenced(5), "head")
    assert not stage.posts.works
    assert not stage.posts.kept.groups
    assert not stage.node.store.entries
    assert not stage.node.store.granted
