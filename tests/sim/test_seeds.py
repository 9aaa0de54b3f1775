"""Random programs under harm: right results, all laws after every event, nothing left. A seed repeats a run."""
from __future__ import annotations

import pytest

from flowengine.chaos.sim import SCENARIOS, simulate, story_of

SEEDS = (("calm", 20), ("workers", 60), ("copies", 40), ("spill", 20), ("nodes", 40), ("durable", 40), ("all", 40),
         ("actors_calm", 20), ("actors", 80), ("actors_all", 80), ("actors_of_tasks", 60), ("actors_wild", 40),
         ("actors_storm", 60), ("actors_torn", 40), ("policies_calm", 20), ("policies", 40), ("policies_actors", 40),
         ("resources_calm", 20), ("resources", 60))
SEEDS += (("gangs_calm", 20), ("gangs", 40), ("gangs_tight", 20), ("gangs_all", 60))
CHUNK = 20
RUNS = [(name, first) for name, count in SEEDS for first in range(0, count, CHUNK)]

# Seeds that have shown a fault of a machine, with what it was.
TELLING = (
    ("calm", 6),        # a container stayed pinned when what was read from it was dropped before its owner confirmed
    ("calm", 22),       # a result that nobody waits for any more kept what it refers to
    ("workers", 42),    # a result sealed by an attempt that died was kept by its node for good
    ("workers", 117),   # an heir passed a question on to a dead owner
    ("workers", 385),   # an heir that did not know an object was told of a borrower's end, but not of its beginning
    ("workers", 1041),  # a value was adopted whose references had died with its owner
    ("workers", 3161),  # an owner died that should have told others about a borrower
    ("workers", 1373),  # a lease was kept for good when its worker gave back all that it had
    ("copies", 142),    # a parent that ran again in the same process forgot who borrowed its child
    ("nodes", 5),       # after its node was started again a driver asked only the old one for slots
    ("nodes", 8),       # and for bytes
    ("nodes", 42),      # the news of a copy came after the loss of the others
    ("nodes", 1453),    # an heir was taken for the owner by a node
    ("all", 67),        # a copy that could not be had stayed where it was
    ("all", 174),       # an object was asked of a node that was about to drop it; an item was lost while its stream ran
    ("all", 6134),      # an object that was lost with its owner was still to be announced to it
    ("all", 4173),      # and so did one that the owner itself could not have
    ("nodes", 4139),    # inputs of a task that was forgotten when a dead owner's object was adopted
    ("all", 262),       # two owners of one object freed each other's copies
    ("actors_calm", 2),   # a call was sent as a task behind the task whose result it needed
    ("actors_calm", 6),   # a caller that got another handle numbered its calls anew; a dead actor's calls stayed pinned
    ("actors", 6),        # a call that had called others ran after another caller's when its actor came back
    ("actors", 11),       # a checkpoint forgot the numbers of calls by a handle that was let go
    ("actors", 86),       # a call that two runs of its caller made was answered to one of them
    ("actors", 87),       # calls of a task that would run again were taken back when its maker died
    ("actors", 429),      # an owner counted a borrower twice that kept a call once
    ("actors_all", 200),  # an actor waited for a caller that had been dead when it first asked for it
    ("actors_wild", 86),  # a caller that lost its actor's maker kept a note of the actor for good
    ("actors_all", 1003), # and so did the maker, of an actor that had died
    ("actors_of_tasks", 475),  # who called an actor that was cancelled before it began waited for ever
    ("actors_torn", 757), # an actor came back in the process that had made an input of a call, and had forgotten it
    ("actors_of_tasks", 98),   # an actor waited for an argument that its maker, who ran again, would bring in the end
    ("actors_of_tasks", 502),  # and for one that its dead owner's heir was asked for, who waited for the maker
    ("actors", 2102),     # an actor and its caller died at once, and another caller's call came between
    ("actors_storm", 314),   # a reply went to a run of its caller that was over
    ("actors_storm", 1416),  # a task had ended, and its calls died with its worker and the actor
    ("actors_wild", 139),    # and so did a call that nobody waited for
    ("actors_all", 10268),   # the node that was to ask the others what they know was dead too
    ("actors_all", 422),  # a call that was kept held its actor alive by an input that it had with it
    ("durable", 148),     # a container that was adopted did not hold what is inside of it
    ("actors_torn", 43),  # the last who looked at an actor died when its task had ended
    ("actors_wild", 418),    # an actor that came back waited for an argument of a maker that waited for the actor
    ("actors_wild", 911),    # a call that was sent when its caller had ended died with its process and the actor
    ("actors_wild", 1022),   # a late reply of the last incarnation was taken for one of the next
    ("resources", 35),    # a worker did not answer an owner from which it had been cut off for a while
    ("gangs_all", 28),    # a member that went on after a wait in its bundle was not listed as taking more than there is
    ("gangs_all", 124),   # a program's node died, and its gang ended though members ran on other nodes
    ("gangs_all", 362),   # a node that was cut off had forgotten a demand, which was not said again
    ("gangs_all", 2023),  # a gang was not wanted any more while its program's node was cut off, and was kept for good
    ("gangs_tight", 52),  # bundles whose members had ended were what a gang needed that the last member waited for
    ("gangs_tight", 318),    # a container was made again, and an older copy was read, with its former owners
    ("spill", 70104),        # a value was lost on purpose before its node knew that it had it, which kept it for good
    ("actors_wild", 1200),   # an actor was held by the argument of another, which its own call held
    ("durable", 70041),      # a value was made where one was that had been read back, and freed before it was sealed
    ("nodes", 401037),       # and so was one where a copy was
    ("all", 402081),         # a slot came that a node had granted before its end, after the news of that
)


@pytest.mark.parametrize(("name", "first"), RUNS)
def test_seeds(name, first):
    report = simulate(name, range(first, first + CHUNK))
    assert not report.failures, str(report)
    assert report.tasks > 10 * CHUNK


@pytest.mark.parametrize(("name", "seed"), TELLING)
def test_telling_seeds(name, seed):
    report = simulate(name, [seed])
    assert not report.failures, str(report)


def test_a_seed_repeats_a_run():
    assert story_of(SCENARIOS["all"], 3) == story_of(SCENARIOS["all"], 3)


def test_a_report_reads_well():
    text = str(simulate("calm", range(2), nodes=2))
    assert text.startswith("calm: 2 seeds, 0 failed")
    assert "messages per task" in text
