"""Virtual time and a virtual network: one heap of what happens when, and links that are ordered and lose nothing.

Owns delays, cuts and the verdict that a peer is gone. Knows nothing of what the messages mean.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from flowengine.core.messages import Message, Ping, Pong

from .sim_settings import NetSettings

Action = Callable[..., None]


class Clock:
    """Virtual seconds; what is due at the same moment happens in the order in which it was asked for."""

    __slots__ = ("_heap", "_order", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = 0

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Do this so much later."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._order, action, arguments))

    def step(self, until_s: float) -> bool:
        """Do what is due next; False when nothing is due before `until_s`."""
        heap = self._heap
        if not heap or heap[0][0] > until_s:
            return False
        self.now, _, action, arguments = heapq.heappop(heap)
        action(*arguments)
        return True


class Peer:
    """A process on the network."""

    __slots__ = ("address", "alive", "forgiving", "frozen", "given_up", "held", "host", "known")

    def __init__(self, address: str, host: str, forgiving: bool = False) -> None:
        self.address = address
        self.host = host
        self.alive = True
        self.frozen = False
        self.held: deque[tuple[Action, tuple[Any, ...]]] = deque()  # what comes while it stands still
        self.known: dict[str, None] = {}  # peers that it has a link to
        self.given_up: dict[str, None] = {}
        self.forgiving = forgiving  # a peer that was given up may come back

    def deliver(self, message: Message, sender: str) -> None:
        """A message arrives."""
        raise NotImplementedError

    def lost(self, peer: str, reason: str) -> None:
        """The link says that a peer is gone for good."""
        raise NotImplementedError

    def run(self, action: Action, *arguments: Any) -> None:
        """Do this in the process: now, when it goes on, or never."""
        if not self.alive:
            return
        if self.frozen:
            self.held.append((action, arguments))
        else:
            action(*arguments)


class Link:
    """One direction between two processes."""

    __slots__ = ("busy_until_s", "flight", "held")

    def __init__(self) -> None:
        self.busy_until_s = 0.0
        self.flight: deque[Message] = deque()
        self.held = False  # cut: what is in flight waits


class Network:
    """All processes and the links between them."""

    def __init__(self, clock: Clock, dice: Random, settings: NetSettings) -> None:
        self.clock = clock
        self.dice = dice
        self.settings = settings
        self.peers: dict[str, Peer] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.cut: dict[str, float] = {}  # hosts that nothing goes to or comes from, since when
        self.spike_until_s = 0.0
        self.counts: dict[str, int] = {}  # messages by kind

    def add(self, peer: Peer) -> None:
        """A process begins to listen."""
        self.peers[peer.address] = peer

    # --- messages ---------------------------------------------------------------------------------

    def send(self, sender: Peer, to: str, message: Message) -> None:
        """Send in order; lost frames are sent again by the link, so they are only late."""
        kind = type(message)
        if kind is not Ping and kind is not Pong:
            name = kind.__name__
            self.counts[name] = self.counts.get(name, 0) + 1
        if to in sender.given_up:
            if not sender.forgiving:
                return
            del sender.given_up[to]
        sender.known[to] = None
        target = self.peers.get(to)
        if target is None or not target.alive or (sender.address in target.given_up and not target.forgiving):
            self.clock.after(self.delay_s(), sender.run, self.give_up, sender, to, "connection refused")
            return
        target.known[sender.address] = None
        link = self.links.get((sender.address, to))
        if link is None:
            link = self.links[sender.address, to] = Link()
        link.flight.append(message)
        if not link.held:
            if sender.host != target.host and (sender.host in self.cut or target.host in self.cut):
                link.held = True
                return
            self.schedule(link, sender, target, 1)

    def schedule(self, link: Link, sender: Peer, target: Peer, count: int) -> None:
        """So many of the messages in flight will arrive."""
        for _ in range(count):
            due_s = max(link.busy_until_s, self.clock.now + self.delay_s())
            link.busy_until_s = due_s
            self.clock.after(due_s - self.clock.now, self.arrive, link, sender, target)

    def delay_s(self) -> float:
        """Of one message: usually short, now and then sent again, long in a spike."""
        settings, chance = self.settings, self.dice.random()
        delay_s = settings.delay_s * (0.5 + chance)
        if settings.loss > 0 and chance * 7919 % 1 < settings.loss:
            delay_s += settings.resend_s * (1 + chance)
        if self.clock.now < self.spike_until_s:
            delay_s += settings.spike_s * chance
        return delay_s

    def arrive(self, link: Link, sender: Peer, target: Peer) -> None:
        """The oldest message in flight has come."""
        if link.held or not link.flight:
            return
        message = link.flight.popleft()
        if target.alive and sender.address not in target.given_up:
            if target.frozen:
                target.run(target.deliver, message, sender.address)
            else:
                target.deliver(message, sender.address)

    # --- harm -------------------------------------------------------------------------------------

    def died(self, peer: Peer) -> None:
        """The process has ended: a part of what it sent last may still arrive, then its peers hear of it."""
        peer.alive = False
        peer.held.clear()
        for to in peer.known:
            target = self.peers.get(to)
            link = self.links.get((peer.address, to))
            if link is not None and link.flight and self.dice.random() < 0.5:
                keep = self.dice.randrange(len(link.flight) + 1)
                while len(link.flight) > keep:
                    link.flight.pop()
            self.links.pop((to, peer.address), None)
            if target is not None and target.alive:
                due_s = link.busy_until_s - self.clock.now if link is not None else 0.0
                if link is not None and link.held:
                    due_s = self.settings.link_lost_s
                told_s = max(due_s, 0.0) + self.delay_s()
                self.clock.after(told_s, target.run, self.give_up, target, peer.address, "closed")

    def give_up(self, peer: Peer, other: str, reason: str) -> None:
        """The link's verdict, once."""
        if not peer.alive or other in peer.given_up or other not in peer.known:
            return
        if not peer.forgiving:
            peer.given_up[other] = None
        peer.known.pop(other, None)
        peer.lost(other, reason)

    def has_ended(self, address: str) -> bool:
        """Whether who dials it is refused: nobody listens there any more, and its host can be reached."""
        peer = self.peers.get(address)
        return peer is not None and not peer.alive and peer.host not in self.cut

    def cut_host(self, host: str) -> None:
        """Nothing goes to or comes from this host until it is healed."""
        self.cut[host] = self.clock.now
        for (sender, to), link in self.links.items():
            if not link.held and self.crosses(sender, to, host):
                link.held = True
        self.clock.after(self.settings.link_lost_s, self.still_cut, host, self.clock.now)

    def crosses(self, sender: str, to: str, host: str) -> bool:
        """Whether the link leaves the host."""
        first, second = self.peers.get(sender), self.peers.get(to)
        return first is not None and second is not None and (first.host == host) != (second.host == host)

    def still_cut(self, host: str, since_s: float) -> None:
        """The cut has lasted so long that links are given up on both sides."""
        if self.cut.get(host) != since_s:
            return
        for sender, to in list(self.links):
            if self.crosses(sender, to, host):
                self.links[sender, to].flight.clear()
                peer, other = self.peers[sender], self.peers[to]
                peer.run(self.give_up, peer, to, "not reached")
                other.run(self.give_up, other, sender, "not reached")

    def heal_host(self, host: str) -> None:
        """What waited goes on."""
        self.cut.pop(host, None)
        for (sender, to), link in list(self.links.items()):
            if link.held and self.crosses(sender, to, host):
                first, second = self.peers[sender], self.peers[to]
                if first.host in self.cut or second.host in self.cut:
                    continue
                link.held = False
                self.schedule(link, first, second, len(link.flight))

    def freeze(self, peer: Peer) -> None:
        """The process stands still; its links stay open."""
        peer.frozen = True

    def thaw(self, peer: Peer) -> None:
        """It goes on with what has come meanwhile."""
        peer.frozen = False
        while peer.held and peer.alive and not peer.frozen:
            action, arguments = peer.held.popleft()
            action(*arguments)
