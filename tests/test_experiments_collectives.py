"""The experiments with collectives: what needs no engine."""
from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from experiments import testbed, two_hosts
from experiments.collective_applications import program as applications
from experiments.collective_applications import run as applied
from experiments.collective_failures import program as failing
from experiments.collective_failures import run as failures
from experiments.collective_soak import program as soaking
from experiments.collective_soak import run as soak
from experiments.collectives import run as collectives
from experiments.collectives import trial
from experiments.locality import run as locality
from experiments.reduce_degree import run as degrees

MIB = 1 << 20


class Alone:
    """A group of one, which may be wrong."""

    rank, size = 0, 1

    def __init__(self, offset=0):
        self.offset = offset

    def barrier(self):
        pass

    def ready(self, op, x):
        return lambda: x + self.offset


# collectives


def test_a_trial_times_what_is_right_and_refuses_what_is_not():
    for op in trial.OPS:
        case = trial.Case(op, 64, 3)
        assert len(trial.durations(Alone(), case)) == 3
        with pytest.raises(ValueError, match=op):
            trial.durations(Alone(1), case)
    assert trial.slowest([[1, 5], [2, 3]]) == [2, 5]
    assert trial.cases_of(json.dumps([trial.Case("reduce", 8, 1)])) == [trial.Case("reduce", 8, 1)]


def test_the_bound_is_that_of_the_links():
    assert collectives.bound_s("reduce", 64 * MIB, 8, 400) == pytest.approx(1.40, abs=0.01)
    assert collectives.bound_s("allreduce", 64 * MIB, 8, 400) == pytest.approx(2.46, abs=0.01)


def test_tables_and_pictures_of_what_was_measured_and_bounds_that_are_missed():
    local = [collectives.Row("processes", 4, peer, "allreduce", 64 * MIB, [seconds, 1.0, seconds])
             for peer, seconds in (("group", 0.03), ("gloo", 0.2))]
    hosts = [collectives.Row("hosts", 8, peer, "reduce", 64 * MIB, [2.0]) for peer in ("group", "ray")]
    for rows in (local, hosts, local + hosts):
        ElementTree.fromstring(collectives.draw(rows, 400))
    assert "| 4 | 64 MiB | 30.0 | 200.0 |" in collectives.report(local, 400)
    assert "| reduce | 64 MiB | 1.404 | 2.000 | 2.000 |" in collectives.report(hosts, 400)
    assert collectives.faults(local, 400) == []
    assert len(collectives.faults(hosts, 400)) == 1
    assert collectives.faults(hosts, 100) == []


def test_it_is_said_why_there_are_no_hosts(tmp_path):
    assert "no script" in testbed.missing("")
    assert "not a program" in testbed.missing(str(tmp_path / "none"))


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--hosts", "/none"], 2)])
def test_placing_without_hosts_is_left_out_unless_they_were_asked_for(arguments, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    assert two_hosts.run("", tmp_path, locality.TRIAL) == code
    assert "nothing is measured" in capsys.readouterr().err


def test_a_ratio_is_told_in_words_that_hold_on_either_side_of_one():
    found = {"with": [(0.5, 0)], "without": [(0.2, MIB)]}
    assert "it takes 0.4 times as long" in locality.report(found, (MIB, 1), "links")


def test_what_a_program_says_last_counts_and_its_errors_are_shown():
    say = testbed.start(["sh", "-c", "echo first; echo [1]"])
    assert testbed.last_json(say, "say", 10) == [1]
    with pytest.raises(testbed.ProgramFailed, match="lost"):
        testbed.last_json(testbed.start(["sh", "-c", "echo lost >&2; exit 3"]), "fail", 10)


def test_what_is_served_on_a_host_ends_with_it():
    with testbed.Bed(1) as bed:
        bed.serve(0, "sh", "-c", "echo here; sleep 1000")
        bed.until_told(0, "here")
        process = bed.servers[0][1]
    assert process.returncode


# reduce_degree


def test_much_goes_through_a_chain_and_little_through_a_tree():
    chosen = [int(line.split("|")[-2]) for line in degrees.model(47.8e6).splitlines()[2:]]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > 1 == chosen[-1]


def test_a_choice_is_wrong_when_a_fixed_degree_is_much_faster():
    fine = degrees.Cell(MIB, [[0.1], [0.3], [0.095], [0.2], [0.4]])
    assert degrees.faults([fine]) == []
    assert len(degrees.faults([fine, degrees.Cell(MIB, [[0.2], [0.1], [0.3], [0.3], [0.3]])])) == 1
    ElementTree.fromstring(degrees.draw([fine, fine._replace(nbytes=4 * MIB)]))


# collective_failures


def test_bounds_of_late_and_dead_members():
    load = failures.Load(8, 64 * MIB, 1.0, 1.2, 1.4)
    late = [[0.2]] * len(failures.late_cases(load))
    killed = {"calm_s": [2.5] * 4, "hurt_s": [2.5, 2.5, 4.0, 2.5], "restart_s": 0.5, "bytes_sent_again": 0,
              "collectives_repaired": 1, "actor_restarts": 1}  # fmt: skip
    found = {"late": late, "refs": late[:4], "killed": [killed, killed]}
    assert failures.faults(load, found) == []
    assert "| a host loses power | 2.50 | 4.00 | 1.50 | 0.50 | 0.0 | 1 |" in failures.report(load, found)
    ElementTree.fromstring(failures.draw(load, found))
    found["late"][1] = [2.0]
    found["killed"] = [{**killed, "hurt_s": [2.5, 2.5, 9.0, 2.5]}]
    assert len(failures.faults(load, found)) == 2


def test_notes_are_read_in_their_order(tmp_path):
    assert failing.noted(str(tmp_path), "killed") == []
    failing.note(str(tmp_path), "killed")
    failing.note(str(tmp_path), "killed")
    first, second = failing.noted(str(tmp_path), "killed")
    assert first <= second


# collective_soak


def test_harm_is_the_same_each_time_and_never_hits_the_host_of_the_program():
    harms = list(soaking.harms(1, 200, 6, 3))
    assert harms == list(soaking.harms(1, 200, 6, 3)) != list(soaking.harms(2, 200, 6, 3))
    assert sum(harm.member != soaking.NOBODY for harm in harms) >= 40
    assert sum(harm.node != soaking.NOBODY for harm in harms) == 20
    assert all(harm.node != 0 for harm in harms)


def test_each_order_of_addition_has_bits_of_its_own():
    for dtype in soak.DTYPES:
        x, y, z = (soaking.array_of(rank, dtype, 4096) for rank in range(3))
        assert not np.array_equal((x + y) + z, x + (y + z))


def test_growth_and_other_bits_are_faults():
    calm = soaking.Held(1000 * MIB, 100, 10, 0)
    grown = [soak.Growth(1024, 10, 1.0, calm, calm), soak.Growth(MIB, 10, 1.0, calm, calm._replace(files=200))]
    bits = [soak.Bits("f4", 200, 50, 20, 0, 3, 0), soak.Bits("f2", 200, 50, 20, 1, 3, 0)]
    assert [line.split()[0] for line in soak.faults(bits, grown)] == ["f2:", "10"]
    assert "| f2 | 200 | 50 | 20 | 3 | 0.0 | 1 |" in soak.report(bits, grown)


# collective_applications


def test_both_applications_are_right_with_any_engine():
    def wait(refs, num_returns):
        return refs[:num_returns], refs[num_returns:]

    class Handle:
        def __init__(self, value):
            self.value = value

    class Remote:
        def __init__(self, made):
            self.made = made

        def __getattr__(self, name):
            method = getattr(self.made, name)
            return type("Method", (), {"remote": staticmethod(lambda ref: Handle(method(ref.value)))})

    engine = applications.Engine(Handle, lambda ref: ref.value, wait, lambda refs: sum(ref.value for ref in refs),
                                 lambda kind, hosts: [Remote(kind(host)) for host in hosts])  # fmt: skip
    cases = [("asynchronous SGD", 4096, 2), ("serving an ensemble", MIB, 3)]
    assert [len(times) for times in applications.measure(engine, 4, cases)] == [2, 3]


def test_both_engines_in_one_table_and_picture():
    rows = [applied.Row(engine, "asynchronous SGD", 25 * MIB, [seconds])
            for engine, seconds in (("flowengine", 1.0), ("ray", 2.5))]
    assert "| asynchronous SGD | 25 MiB | 1.000 | 2.500 | 2.5 x |" in applied.report(rows, 400)
    ElementTree.fromstring(applied.draw(rows))
    ElementTree.fromstring(applied.draw(rows[:1]))
