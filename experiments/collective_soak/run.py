"""Do members of a group see the same bits whatever happens, and does anything grow?

    python experiments/collective_soak/run.py [--quick] [--runs 200] [--small 10000] [--large 200] [--seed 1]

Runs with late and killed members and killed nodes, on three nodes of this host; then many small and large operations
in one engine, with what all its processes hold before and after. Writes results.json and the numbers in README.md;
with --quick it prints only. The exit status is 1 when bits differ or something grew.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import flowengine as flow
from experiments.collective_soak.program import NOBODY, Harm, Held, Member, harms, held
from experiments.pages import fill, table
from experiments.testbed import Bed

HERE = Path(__file__).resolve().parent
KIB, MIB = 1 << 10, 1 << 20
HOSTS, SIZE = 3, 6
DTYPES = ("f4", "f2")
BYTES = 4 * MIB  # of an array whose bits are compared
STEP_S = 60.0
MEMBERS, BATCH = 4, 20  # of the part that looks for growth: ranks, and operations of a call
SMALL_BYTES, LARGE_BYTES = 1 * KIB, 16 * MIB
WARM_UP_SHARE = 0.1
GROWTH_MAX = Held(30 * MIB, 8, 8, MIB)
SETTLED_S, LOOK_S = 10.0, 0.2


# --- the same bits ------------------------------------------------------------------------------------


class Bits(NamedTuple):
    """What came out: how many runs of each dtype, with what harm, and how many results were not the first one's."""

    dtype: str
    runs: int
    members_killed: int
    nodes_killed: int
    differ: int
    repaired: int
    sent_again: int


class Group:
    """A group whose members are spread evenly over the nodes, formed anew when a node has died."""

    def __init__(self, bed: Bed, dtype: str) -> None:
        self.bed, self.dtype, self.formed = bed, dtype, 0
        self.members: list[Any] = []

    def ready(self) -> list[Any]:
        """The members, each where it belongs; the first node is that of this program."""
        while not self.members:
            mine = flow.context().node_id
            while len(nodes := sorted(node.node_id for node in flow.nodes())) < self.bed.hosts:
                time.sleep(LOOK_S)
            nodes.sort(key=lambda node: node != mine)
            homes = [nodes[rank * len(nodes) // SIZE] for rank in range(SIZE)]
            self.formed += 1
            made = [
                Member.options(placement=flow.scheduling.soft([flow.scheduling.node(home)])).remote(
                    f"{self.dtype} {self.formed}", SIZE, rank)
                for rank, home in enumerate(homes)
            ]  # fmt: skip
            if [where for _, where in flow.get([one.whom.remote() for one in made])] == homes:
                self.members = made
            else:
                self.end(made)
        return self.members

    def end(self, members: Sequence[Any] = ()) -> None:
        """The members are not needed any more."""
        for member in members or self.members:
            flow.kill(member)
        self.members = []

    def run(self, harm: Harm) -> list[str]:
        """The digest of each rank."""
        members = self.ready()
        pids = [pid for pid, _ in flow.get([one.whom.remote() for one in members])]
        refs = [one.digest.remote(self.dtype, BYTES, delay_s)
                for one, delay_s in zip(members, harm.delays_s, strict=True)]
        time.sleep(harm.after_s)
        if harm.member != NOBODY:
            os.kill(pids[harm.member], signal.SIGKILL)
        if harm.node != NOBODY:
            self.bed.crash(harm.node)
            self.bed.node(harm.node)
        found = flow.get(refs, timeout=STEP_S)
        if harm.node != NOBODY:
            self.end(members)
        return list(found)


def same_bits(runs: int, seed: int) -> list[Bits]:
    """All runs of each dtype."""
    found = []
    with Bed(HOSTS) as bed, flow.init(address=bed.cluster()):
        for dtype in DTYPES:
            group, before = Group(bed, dtype), flow.stats()
            wanted, differ = "", 0
            rounds = [Harm((0.0,) * SIZE, NOBODY, NOBODY, 0.0), *harms(seed, runs, SIZE, HOSTS)]
            for number, harm in enumerate(rounds):
                digests = group.run(harm)
                wanted = wanted or digests[0]
                differ += sum(digest != wanted for digest in digests)
                if number % 20 == 0:
                    sys.stderr.write(f"{dtype}: {number} of {runs} runs, {differ} results differ\n")
            group.end()
            after = flow.stats()
            repaired, again = (after[name] - before[name] for name in ("collectives_repaired", "bytes_sent_again"))
            killed = [sum(getattr(harm, what) != NOBODY for harm in rounds) for what in ("member", "node")]
            found.append(Bits(dtype, runs, *killed, differ, repaired, again))
    return found


# --- growth -------------------------------------------------------------------------------------------


class Growth(NamedTuple):
    """Operations of one size, and what all processes held before and after."""

    nbytes: int
    count: int
    took_s: float
    before: Held
    after: Held

    @property
    def grown(self) -> Held:
        """After less before."""
        return Held(*(last - first for first, last in zip(self.before, self.after, strict=True)))


def repeat(members: Sequence[Any], nbytes: int, count: int) -> None:
    """So many operations, a few in each call."""
    for begin in range(0, count, BATCH):
        flow.get([one.repeat.remote(nbytes, min(BATCH, count - begin)) for one in members])


def settled() -> Held:
    """The least that is held within a while: some is let go of in the background."""
    least, end = held(), time.monotonic() + SETTLED_S
    while time.monotonic() < end:
        time.sleep(LOOK_S)
        least = Held(*map(min, held(), least))
    return least


def growth(small: int, large: int) -> list[Growth]:
    """Many operations; the first ones fill pools and caches."""
    found = []
    with flow.init(num_workers=2):
        members = [Member.remote("grows", MEMBERS, rank) for rank in range(MEMBERS)]
        for nbytes, count in ((SMALL_BYTES, small), (LARGE_BYTES, large)):
            # Several calls: the allocator keeps an array of this size from the second one on.
            repeat(members, nbytes, max(3 * BATCH, int(count * WARM_UP_SHARE)))
            before, began = settled(), time.monotonic()
            repeat(members, nbytes, count)
            took_s = time.monotonic() - began
            found.append(Growth(nbytes, count, took_s, before, settled()))
            sys.stderr.write(f"{count} operations on {nbytes // KIB} KiB: done\n")
    return found


# --- reporting ----------------------------------------------------------------------------------------


def report(bits: Sequence[Bits], grown: Sequence[Growth]) -> str:
    """The tables."""
    rows = [(one.dtype, one.runs, one.members_killed, one.nodes_killed, one.repaired, f"{one.sent_again / MIB:.1f}",
             one.differ) for one in bits]
    heads = ("dtype", "runs", "members killed", "nodes killed", "steps repaired", "MiB sent again",
             "results that differ")  # fmt: skip
    lines = [(f"{one.nbytes // KIB:,} KiB", f"{one.count:,}", f"{1e3 * one.took_s / one.count:.1f}",
              f"{one.before.resident / MIB:.0f}", f"{one.grown.resident / MIB:+.1f}", f"{one.grown.files:+d}",
              f"{one.grown.shared_files:+d}", f"{one.grown.shared_bytes / MIB:+.1f}") for one in grown]
    names = ("size", "operations", "each (ms)", "resident before (MiB)", "growth (MiB)", "open files",
             "shared files", "shared memory (MiB)")  # fmt: skip
    return f"{table(heads, rows)}\n{table(names, lines)}"


def faults(bits: Sequence[Bits], grown: Sequence[Growth]) -> list[str]:
    """What must not be."""
    missed = [f"{one.dtype}: {one.differ} results differ" for one in bits if one.differ]
    for one in grown:
        missed += [f"{one.count} operations on {one.nbytes} bytes: {name} grew by {number}"
                   for name, number, most in zip(Held._fields, one.grown, GROWTH_MAX, strict=True) if number > most]
    return missed


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few runs; writes nothing")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--small", type=int, default=10_000)
    parser.add_argument("--large", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.runs, chosen.small, chosen.large = 10, 200, 20
    grown = growth(chosen.small, chosen.large)
    bits = same_bits(chosen.runs, chosen.seed)
    text = report(bits, grown)
    sys.stdout.write(text)
    if not chosen.quick:
        (HERE / "results.json").write_text(json.dumps({"bits": bits, "growth": grown}, indent=1) + "\n")
        fill(HERE / "README.md", text)
    missed = faults(bits, grown)
    sys.stdout.write("\n" + "\n".join(missed or ["all holds"]) + "\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
