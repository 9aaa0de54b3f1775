"""Nodes without workers over real links on loopback: the Node machine, its store and its part for collectives."""
from __future__ import annotations

import asyncio
import time

import numpy as np

from flowengine.collectives import plan
from flowengine.config import Config
from flowengine.core import collective as co
from flowengine.core import messages as m
from flowengine.core.commands import Send
from flowengine.core.invariants import check
from flowengine.core.node import Node
from flowengine.core.node_desk import NodeSettings
from flowengine.objects import codec
from flowengine.objects.segments import Segments
from flowengine.runtime import process
from flowengine.runtime.drive import Drive
from flowengine.runtime.node_collectives import Collectives

GROUP = b"group"
LEDGER, MEMBER = "ledger", "member"


class Host:
    """One node; what it says to members and the ledger is kept in `said`."""

    def __init__(self, folder, config, tls=None, limit_bytes=1 << 30):
        folder.mkdir(mode=0o700)
        self.config, self.folder, self.limit_bytes = config, folder, limit_bytes
        self.segments = Segments(str(folder), 0)
        self.writer = Segments(str(folder), 0)
        self.collectives = Collectives(self.segments, Segments(str(folder), limit_bytes // 4), self.open_stream, config)
        place = process.Place(host="127.0.0.1", secret=b"s" * 32, tls=tls, config=config)
        self.endpoint = process.new_endpoint(place, self.on_batch, self.on_lost, self.on_stream)
        self.said = []
        self.changed = asyncio.Event()

    async def start(self):
        await self.endpoint.start()
        me = self.address = self.endpoint.address
        self.machine = Node(NodeSettings(
            me=me, node_id=me, host="h", total=(), num_workers=0, store_folder=str(self.folder),
            store_limit_bytes=self.limit_bytes, session="s", head="head"), self.config)
        self.drive = Drive(self.machine)
        self.drive.attach(self.endpoint, asyncio.get_running_loop(), me)
        send = self.drive.perform[Send]
        self.drive.perform[Send] = lambda order: send(order) if "://" in order.to else self.hear(order)
        self.drive.perform.update(self.collectives.orders)
        self.collectives.me, self.collectives.step = me, self.drive.step
        self.collectives.remove_other = lambda order: self.segments.free(order.oid.hex(), order.file)

    def hear(self, order):
        self.said.append((order.to, order.message))
        self.changed.set()

    async def heard(self, kind, count=1):
        """The messages of a kind, when there are so many."""
        while len(found := [message for _, message in self.said if type(message) is kind]) < count:
            self.changed.clear()
            await self.changed.wait()
        return found

    def on_batch(self, peer, messages):
        self.drive.batch(peer, messages)

    def on_lost(self, peer, reason):
        self.drive.lost(peer, reason)

    async def on_stream(self, peer, hello, stream):
        await self.collectives.lanes.serve(peer, stream)

    async def open_stream(self, to, hello):
        return await self.endpoint.open_stream(to, hello)

    def order(self, message):
        self.drive.step(message, LEDGER)

    def give(self, oid, array):
        """Write an array as a member does."""
        packed = codec.pack(array)
        size = codec.layout_bytes(packed)
        segment = self.writer.create(oid.hex(), size)
        codec.write_object(segment.view, packed, oid.hex().encode())
        self.drive.step(m.ObjectSealed(oid, size, self.address, segment.seal()), MEMBER)

    def value(self, oid):
        view = self.segments.open(oid.hex())
        return None if view is None else codec.read_object(view)

    def laws(self):
        return check(self.machine)

    async def close(self):
        self.collectives.close()
        await self.endpoint.close()


class Ring:
    """A group of members on hosts, and the plans of its steps."""

    def __init__(self, hosts, places, config):
        self.hosts, self.places, self.config = hosts, places, config
        self.nodes = [hosts[place].address for place in places]
        self.seating = plan.seating(GROUP, 1, self.nodes)
        self.number = 0

    def give(self, header, arrays, epoch=1, number=None):
        """Write what ranks give; the plan of the step. header: op, fold, root."""
        step = (-1, -1, self.number if number is None else number)
        headers, gifts = [], []
        for rank, array in arrays.items():
            part = co.ArrayPart(array.dtype.str, array.shape, 0)
            headers.append((rank, co.Header(*header, "*", (part,), array.nbytes)))
            oid = plan.gift_name(GROUP, step, rank)
            self.hosts[self.places[rank]].give(oid, array)
            gifts.append((rank, self.nodes[rank], oid))
        takers = tuple((rank, node, f"{MEMBER}{rank}") for rank, node in enumerate(self.nodes))
        self.number += 1
        return plan.StepPlan(GROUP, step, epoch, self.seating, tuple(headers), tuple(gifts), takers,
                             self.config.collective_piece_bytes)

    async def carry_out(self, course):
        """Order a course and wait until all nodes have done it; the seconds it took."""
        began_s = time.perf_counter()
        nodes = {post.node for post in course.posts}
        used = [host for host in self.hosts if host.address in nodes]
        before = [sum(type(message) is co.CourseDone for _, message in host.said) for host in used]
        for host in used:
            host.order(course)
        await asyncio.gather(*(host.heard(co.CourseDone, count + 1) for host, count in zip(used, before, strict=True)))
        return time.perf_counter() - began_s

    def end(self, course):
        for host in self.hosts:
            host.order(co.StepEnded(course.op))


def arrays_of(count, length, dtype="<f4"):
    random = np.random.default_rng(7)
    return {rank: (random.standard_normal(length) * 9).astype(dtype) for rank in range(count)}


def config_of(**limits):
    return Config(**{"collective_piece_bytes": 64 << 10, "transfer_timeout_s": 5.0, **limits})
