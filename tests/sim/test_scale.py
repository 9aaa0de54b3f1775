"""The cost of a task does not grow with the cluster: few messages, none of them through the head."""
from __future__ import annotations

from flowengine.chaos.sim import Scenario, simulate
from flowengine.config import Config


def flat(nodes: int):
    config = Config(heartbeat_s=1.0, story_lines_max=1)
    scenario = Scenario(
        name="flat", nodes=nodes, workers=2, tasks=1_500, flat=True, run_s=0.1, check_every=1_000, config=config,
        end_s=1_000.0,
    )
    report = simulate(scenario, [nodes])
    assert not report.failures, str(report)
    return report


def test_messages_per_task_are_few_and_flat():
    small, large = flat(4), flat(40)
    work = ("PutFunction", "PushTask", "TaskDone", "TakeBack", "TakenBack")
    per_task = [sum(report.kinds.get(kind, 0) for kind in work) / report.tasks for report in (small, large)]
    assert max(per_task) < 3.5
    assert per_task[1] < per_task[0] + 0.5


def test_the_head_hears_of_slots_and_not_of_tasks():
    report = flat(10)
    sought = report.kinds.get("SlotsSought", 0)
    assert sought < report.tasks / 20
    assert "TaskDone" not in report.head_kinds
