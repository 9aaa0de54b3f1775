"""Courses carried out by nodes on loopback: bytes through lanes and folds, into results of the store."""
from __future__ import annotations

import asyncio
import errno
import os

import msgspec
import numpy as np
import pytest

from flowengine.collectives import plan
from flowengine.collectives.posts_orders import FoldPiece, PrepareCourse
from flowengine.core import collective as co
from flowengine.core import messages as m
from flowengine.runtime import node_collectives
from flowengine.runtime.connection import new_tls

from .kit import run
from .lane_hosts import GROUP, Ring, arrays_of, config_of
from .lane_hosts import Host as NodeHost

LENGTH = (1 << 18) + 5


@pytest.fixture
def hosts(tmp_path):
    async def make(count, tls=None, config=None, **store):
        config = config or config_of()
        made = [NodeHost(tmp_path / f"host{number}", config, tls, **store) for number in range(count)]
        for host in made:
            await host.start()
        return made

    return make


async def close(made):
    for host in made:
        assert host.laws() == []
    await asyncio.gather(*(host.close() for host in made))


def left_fold(ufunc, arrays, order):
    value = arrays[order[0]]
    for rank in order[1:]:
        value = ufunc(value, arrays[rank])
    return value


@pytest.mark.parametrize("fold", ["sum", "mean", "max", "prod"])
def test_one_node_folds_in_the_order_of_ranks(hosts, fold):
    async def scenario():
        (host,) = made = await hosts(1)
        ring = Ring(made, [0, 0, 0], host.config)
        arrays = arrays_of(3, LENGTH)
        step = ring.give(("allreduce", fold, -1), arrays)
        await ring.carry_out(plan.course(step))
        done = await host.heard(co.StepDone, 3)
        ufunc = {"sum": np.add, "mean": np.add, "max": np.maximum, "prod": np.multiply}[fold]
        expected = left_fold(ufunc, arrays, [0, 1, 2])
        if fold == "mean":
            expected = np.true_divide(expected, 3)
        assert host.value(done[0].oid).tobytes() == expected.tobytes()
        assert {message.oid for message in done} == {plan.result_name(GROUP, step.step, -1)}
        await close(made)

    run(scenario)


@pytest.mark.parametrize(("places", "secure"), [
    ((0, 1), False), ((0, 1), True), ((0, 1, 2), False), ((0, 0, 1, 1, 2), False), ((0, 1, 0, 2, 1), False)])
def test_a_ring_gives_all_the_same_bits(hosts, places, secure):
    async def scenario():
        made = await hosts(max(places) + 1, tls=new_tls() if secure else None)
        ring = Ring(made, places, made[0].config)
        arrays = arrays_of(len(places), LENGTH)
        step = ring.give(("allreduce", "sum", -1), arrays)
        await ring.carry_out(plan.course(step))
        values = [host.value(plan.result_name(GROUP, step.step, -1)) for host in made]
        assert len({value.tobytes() for value in values}) == 1
        np.testing.assert_allclose(values[0].view("<f4"), sum(arrays.values()), rtol=1e-4, atol=1e-3)
        await close(made)

    run(scenario)


@pytest.mark.parametrize("op", ["broadcast", "allgather", "gather", "reduce", "reduce_scatter", "alltoall", "scatter"])
def test_operations_give_what_numpy_gives(hosts, op):
    async def scenario():
        made = await hosts(3)
        places = (0, 1, 1, 2)
        ring = Ring(made, places, made[0].config)
        arrays = {rank: array.reshape(4, -1) for rank, array in arrays_of(4, 1 << 18, "<f8").items()}
        given = {1: arrays[1]} if op in ("broadcast", "scatter") else arrays
        fold = "sum" if "reduce" in op else ""
        step = listed(ring, op, given) if op in ("alltoall", "scatter") else ring.give((op, fold, 1), given)
        await ring.carry_out(plan.course(step))
        taken = {}
        for host in made:
            for to, message in host.said:
                if type(message) is co.StepDone:
                    taken[int(to.removeprefix("member"))] = host.value(message.oid)
        total = sum(arrays[rank] for rank in range(4))
        whole = b"".join(arrays[rank].tobytes() for rank in range(4))
        expected = {
            "broadcast": dict.fromkeys(range(4), arrays[1].tobytes()),
            "allgather": dict.fromkeys(range(4), whole),
            "gather": {1: whole},
            "scatter": {rank: arrays[1][rank].tobytes() for rank in range(4)},
            "alltoall": {rank: b"".join(arrays[source][rank].tobytes() for source in range(4)) for rank in range(4)},
        }.get(op)
        if expected is not None:
            assert {rank: value.tobytes() for rank, value in taken.items()} == expected
        elif op == "reduce":
            np.testing.assert_allclose(taken[1].view("<f8"), total.reshape(-1))
        else:
            for rank in range(4):
                np.testing.assert_allclose(taken[rank].view("<f8"), total[rank])
        await close(made)

    run(scenario)


def listed(ring, op, arrays):
    """A step in which each rank gives a list of the rows of its array."""
    step = ring.give((op, "", 1), arrays)
    headers = []
    for rank, _header in step.headers:
        rows = arrays[rank]
        parts = tuple(co.ArrayPart("<f8", rows[0].shape, number * rows[0].nbytes) for number in range(len(rows)))
        headers.append((rank, co.Header(op, "", 1, str(["*"] * len(rows)), parts,
                                        rows.nbytes)))
    return msgspec.structs.replace(step, headers=tuple(headers))


# --- what goes wrong ------------------------------------------------------------------------------


def test_all_pieces_are_taken_for_a_course_that_waits_for_a_member(hosts, monkeypatch):
    """They would block the lane for others, and one of those may be what the member waits for."""
    monkeypatch.setattr(node_collectives, "EARLY_BYTES_MAX", 1)

    async def scenario():
        a, b = made = await hosts(2)
        ring = Ring(made, [0, 1], a.config)
        arrays = arrays_of(2, LENGTH)
        given = plan.gift_name(GROUP, (-1, -1, 0), 1)
        course = msgspec.structs.replace(plan.course(ring.give(("reduce", "sum", 1), arrays)), awaited=(given,))
        [line] = course.lines
        pieces, all_came = [], asyncio.Event()
        came = b.collectives.came

        def counted(landing):
            came(landing)
            pieces.append(landing)
            if len(pieces) == -(-line.nbytes // line.piece_bytes):
                all_came.set()

        b.collectives.came = counted
        b.order(course)
        a.order(course)
        await all_came.wait()
        assert b.collectives.early_bytes == 0
        b.order(co.GiftCame(course.op, course.epoch, given))
        await b.heard(co.CourseDone)
        assert not b.collectives.awaited
        assert b.value(plan.result_name(GROUP, course.step, 1)).tobytes() == (arrays[0] + arrays[1]).tobytes()
        await close(made)

    run(scenario)


def test_pieces_that_come_before_their_course_wait_for_it(hosts):
    async def scenario():
        a, b = made = await hosts(2)
        ring = Ring(made, [0, 1], a.config)
        arrays = arrays_of(2, LENGTH)
        course = plan.course(ring.give(("allreduce", "sum", -1), arrays))
        landed = asyncio.Event()
        came = b.collectives.came
        b.collectives.came = lambda landing: (came(landing), landed.set())
        a.order(course)
        await landed.wait()
        assert b.collectives.early_bytes > 0
        b.order(course)
        await asyncio.gather(a.heard(co.CourseDone), b.heard(co.CourseDone))
        assert b.collectives.early_bytes == 0
        assert not b.collectives.early
        assert b.value(plan.result_name(GROUP, course.step, -1)).tobytes() == (arrays[0] + arrays[1]).tobytes()
        await close(made)

    run(scenario)


def test_pieces_whose_course_never_comes_are_dropped_in_time(hosts, monkeypatch):
    """Its ledger may have died before it said it to all."""
    monkeypatch.setattr(node_collectives, "EARLY_S", 0.05)
    monkeypatch.setattr(node_collectives, "IDLE_S", 0.05)

    async def scenario():
        a, b = made = await hosts(2)
        ring = Ring(made, [0, 1], a.config)
        course = plan.course(ring.give(("allreduce", "sum", -1), arrays_of(2, LENGTH)))
        gone, failed = asyncio.Event(), b.collectives.failed
        b.collectives.failed = lambda landing: (failed(landing), b.collectives.early or gone.set())
        a.order(course)
        await gone.wait()
        assert b.collectives.early_bytes == 0
        await close(made)

    run(scenario)


def test_a_lane_that_breaks_is_told_by_both_sides_and_the_repair_gives_the_same_bits(hosts):
    async def scenario():
        made = await hosts(3)
        ring = Ring(made, [0, 1, 2], made[0].config)
        arrays = arrays_of(3, 1 << 20)
        first = plan.course(ring.give(("allreduce", "sum", -1), arrays))
        await ring.carry_out(first)
        ring.end(first)
        unbroken = made[0].value(plan.result_name(GROUP, (-1, -1, 0), -1)).tobytes()
        step = ring.give(("allreduce", "sum", -1), arrays)
        course = plan.course(step)
        breaks = asyncio.Event()
        came = made[1].collectives.came
        made[1].collectives.came = lambda landing: (came(landing), breaks.set())
        for host in made:
            host.order(course)
        await breaks.wait()
        made[0].collectives.lanes.lost(made[0].collectives.lanes.out[made[1].address], "cut on purpose")
        (told,), (heard,) = await asyncio.gather(made[0].heard(co.CourseBroken), made[1].heard(co.CourseBroken))
        assert (told.peer, told.reason, heard.peer) == (made[1].address, "cut on purpose", made[0].address)
        for host in made:
            host.order(co.FinalsAsked(course.op, 2))
        finals = [(host.address, (await host.heard(co.Finals))[0]) for host in made]
        again = plan.repaired(msgspec.structs.replace(step, epoch=3), tuple(finals))
        for host in made:
            host.said.clear()
        await ring.carry_out(again)
        for host in made:
            assert host.value(plan.result_name(GROUP, step.step, -1)).tobytes() == unbroken
        await close(made)

    run(scenario)


def test_a_node_that_takes_nothing_is_told(hosts):
    async def scenario():
        a, b = made = await hosts(2, config=config_of(transfer_timeout_s=0.3))
        ring = Ring(made, [0, 1], a.config)
        course = plan.course(ring.give(("broadcast", "", 0), {0: arrays_of(1, 8 << 20)[0]}))
        b.collectives.room = lambda frame: asyncio.Event().wait()  # it stands still
        a.order(course)
        b.order(course)
        (told,) = await a.heard(co.CourseBroken)
        assert told.kind == "peer"
        assert told.peer == b.address
        await close(made)

    run(scenario)


def test_a_gift_that_is_no_array_is_told(hosts):
    async def scenario():
        (host,) = made = await hosts(1)
        ring = Ring(made, [0, 0], host.config)
        step = ring.give(("allreduce", "sum", -1), arrays_of(2, LENGTH))
        course = plan.course(step)
        name = step.gifts[1][2]
        host.writer.free(name.hex())
        host.give(name, {"not": "an array"})
        host.order(course)
        (told,) = await host.heard(co.CourseBroken)
        assert told.kind == "gift"
        assert name.hex() in told.reason
        assert host.machine.store.granted == {}
        await close(made)

    run(scenario)


def test_a_large_result_of_one_node_gets_its_memory_as_it_is_folded(hosts):
    async def scenario():
        (host,) = made = await hosts(1)
        ring, hollow = Ring(made, [0, 0], host.config), []
        create = host.collectives._warm.create

        def watched(*args):
            segment = create(*args)
            hollow.append(segment.is_hollow)
            return segment

        host.collectives._warm.create = watched
        for number in range(3):
            arrays = arrays_of(2, (1 << 20) + number)
            course = plan.course(ring.give(("allreduce", "sum", -1), arrays))
            await ring.carry_out(course)
            value = host.value(plan.result_name(GROUP, course.step, -1))
            assert value.tobytes() == (arrays[0] + arrays[1]).tobytes()
            del value
            ring.end(course)
            host.order(co.StepsForgotten(GROUP, number + 1))
        assert hollow == [True, False, False], "later ones are warm"
        await close(made)

    run(scenario)


def test_a_file_system_that_is_full_breaks_the_fold(hosts, monkeypatch):
    async def scenario():
        (host,) = made = await hosts(1)
        ring = Ring(made, [0, 0], host.config)
        course = plan.course(ring.give(("allreduce", "sum", -1), arrays_of(2, 1 << 20)))
        write = os.pwrite

        def full(descriptor, part, at):
            if len(part) > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, part, at)

        monkeypatch.setattr(os, "pwrite", full)
        host.order(course)
        (told,) = await host.heard(co.CourseBroken)
        assert told.kind == "store"
        assert "no room" in told.reason
        await close(made)

    run(scenario)


def test_a_result_that_goes_on_with_other_nodes_is_given_all_of_its_memory(hosts):
    async def scenario():
        (host,) = made = await hosts(1)
        ring = Ring(made, [0, 0], host.config)
        course = plan.course(ring.give(("allreduce", "sum", -1), arrays_of(2, 1 << 20)))
        begun = asyncio.Event()
        host.drive.perform[FoldPiece] = lambda order: begun.set()
        host.order(course)
        await begun.wait()
        (result,) = host.collectives.opened[course.op].segments
        for epoch, posts in ((2, course.posts), (3, (*course.posts, co.Post("other", (), b"", 0, ())))):
            again = msgspec.structs.replace(course, epoch=epoch, posts=posts)
            host.collectives.prepare(PrepareCourse(again, (), (), (result,)))
            assert host.collectives.opened[course.op].segments[result].is_hollow == (epoch == 2)
        await close(made)

    run(scenario)


def test_results_of_others_have_the_shape_that_was_asked(hosts):
    async def scenario():
        (host,) = made = await hosts(1)
        ring = Ring(made, [0, 0], host.config)
        arrays = {rank: array.reshape(2, -1) for rank, array in arrays_of(2, 1 << 16).items()}
        course = plan.course(ring.give(("allreduce", "sum", -1), arrays))
        course = msgspec.structs.replace(course, owner="somebody", array=co.ArrayPart("<f4", (2, 1 << 15), 0))
        await ring.carry_out(course)
        value = host.value(plan.result_name(GROUP, course.step, -1))
        assert value.dtype == "<f4"
        assert (value == arrays[0] + arrays[1]).all()
        assert value.shape == (2, 1 << 15)
        await close(made)

    run(scenario)


def test_many_steps_leave_nothing_behind(hosts):
    async def scenario():
        made = await hosts(2)
        ring = Ring(made, [0, 1, 1], made[0].config)
        for number in range(12):
            op = ("allreduce", "broadcast", "allgather", "reduce")[number % 4]
            arrays = arrays_of(3, LENGTH)
            step = ring.give((op, "sum" if "reduce" in op else "", 0), {0: arrays[0]} if op == "broadcast" else arrays)
            course = plan.course(step)
            await ring.carry_out(course)
            ring.end(course)
            for host in made:
                host.said.clear()
        for host in made:
            host.order(co.StepsForgotten(GROUP, -1))
            store, shell = host.machine.store, host.collectives
            assert (store.used_bytes, store.granted_bytes, store.entries) == (0, 0, {})
            assert not shell.opened
            assert not shell.early
            assert not host.machine.posts.works
            assert set(store.pools) == {host.address}
            warm = sum(path.stat().st_blocks * 512 for path in host.folder.iterdir() if path.name.startswith("."))
            assert warm == store.pool_bytes == shell._warm.pool_bytes
            assert not [path for path in host.folder.iterdir() if not path.name.startswith(".")]
        await close(made)

    run(scenario)


def test_the_pool_gives_way_to_objects(hosts):
    async def scenario():
        (host,) = made = await hosts(1, limit_bytes=8 << 20)
        ring = Ring(made, [0, 0], host.config)
        course = plan.course(ring.give(("allreduce", "sum", -1), arrays_of(2, LENGTH)))
        await ring.carry_out(course)
        ring.end(course)
        host.order(co.StepsForgotten(GROUP, -1))
        assert host.machine.store.pool_bytes > 0
        host.drive.step(m.SpaceAsked(1, 8 << 20), "member")
        assert host.machine.store.pool_bytes == 0
        assert host.collectives._warm.pool_bytes == 0
        await close(made)

    run(scenario)
