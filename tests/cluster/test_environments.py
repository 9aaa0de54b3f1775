"""Variables and a working folder for one task or actor, in processes that others use as well."""
from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

import flowengine as flow

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def session():
    with flow.init(num_workers=1) as found:
        yield found


@flow.remote
def shown(name="COLOUR"):
    return os.environ.get(name), os.getcwd()


@flow.remote
def printed():
    code = "import os; print(os.environ.get('COLOUR'), os.getcwd())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_it_is_there_while_the_task_runs_and_not_for_others(tmp_path):
    here = flow.get(shown.remote())
    assert here[0] is None
    refs = [shown.options(env_vars={"COLOUR": "red"}).remote(), shown.remote(),
            shown.options(working_dir=tmp_path).remote(), shown.remote(),
            shown.options(env_vars={"COLOUR": "blue"}, working_dir=str(tmp_path)).remote(), shown.remote()]
    assert flow.get(refs) == [("red", here[1]), here, (None, str(tmp_path)), here, ("blue", str(tmp_path)), here]


def test_processes_that_the_task_starts_have_it(tmp_path):
    made = printed.options(env_vars={"COLOUR": "red"}, working_dir=tmp_path)
    assert flow.get(made.remote()) == ["red", str(tmp_path)]


def test_what_was_there_before_is_there_again():
    @flow.remote
    def change():
        os.environ["COLOUR"] = "mine"

    before = flow.get(shown.remote("PATH"))
    assert flow.get(shown.options(env_vars={"PATH": "elsewhere"}).remote("PATH"))[0] == "elsewhere"
    flow.get(change.options(env_vars={"COLOUR": "red"}).remote())
    assert flow.get([shown.remote("PATH"), shown.remote()])[0] == before
    assert flow.get(shown.remote())[0] is None


def test_it_is_restored_after_an_error_and_a_cancel():
    @flow.remote
    def fail(began):
        began.set()
        flow.Event().wait()

    began = flow.Event()
    ref = fail.options(env_vars={"COLOUR": "red"}).remote(began)
    began.wait()
    flow.cancel(ref)
    with pytest.raises(flow.TaskCancelled):
        flow.get(ref)
    assert flow.get(shown.remote())[0] is None


def test_children_have_it_unless_they_are_given_their_own(tmp_path):
    @flow.remote
    def parent():
        return flow.get([shown.remote(), shown.options(env_vars={"OTHER": "x"}).remote(),
                         shown.options(env_vars={"COLOUR": "blue"}).remote()])

    found = flow.get(parent.options(env_vars={"COLOUR": "red"}, working_dir=tmp_path).remote())
    assert found == [("red", str(tmp_path)), ("red", str(tmp_path)), ("blue", str(tmp_path))]


def test_modules_of_a_working_folder_are_its_own(tmp_path):
    @flow.remote
    def number():
        import a_module_of_the_folder  # type: ignore[import-not-found]
        import a_package_of_the_folder.part  # type: ignore[import-not-found]

        assert a_package_of_the_folder.part.NUMBER == a_module_of_the_folder.NUMBER
        return a_module_of_the_folder.NUMBER

    for name in ("1", "2"):
        (tmp_path / name / "a_package_of_the_folder").mkdir(parents=True)  # without a file of its own
        for module in ("a_module_of_the_folder.py", "a_package_of_the_folder/part.py"):
            (tmp_path / name / module).write_text(f"NUMBER = {name}")
    made = [number.options(working_dir=tmp_path / name).remote() for name in ("1", "2", "1")]
    assert flow.get(made) == [1, 2, 1]
    with pytest.raises(ModuleNotFoundError):
        flow.get(number.remote())


def test_an_actor_has_it_for_its_life(tmp_path):
    @flow.remote
    class Shown:
        def __init__(self):
            self.first = os.environ.get("COLOUR"), os.getcwd()

        def now(self):
            return self.first, (os.environ.get("COLOUR"), os.getcwd()), flow.get(shown.remote())

    actor = Shown.options(env_vars={"COLOUR": "red"}, working_dir=tmp_path).remote()
    expected = (("red", str(tmp_path)),) * 3
    assert flow.get(actor.now.remote()) == expected
    flow.chaos.kill_worker(of=actor)
    assert flow.get(actor.now.remote()) == expected


def test_a_folder_that_is_not_there(tmp_path):
    gone = shown.options(working_dir=tmp_path / "gone")
    with pytest.raises(flow.BadValue, match=r"working_dir '.*gone' cannot be used on host"):
        flow.get(gone.remote())
    assert flow.get(shown.remote())[0] is None

    @flow.remote(working_dir=tmp_path / "gone")
    class Lost:
        def call(self):
            return 1

    with pytest.raises(flow.BadValue, match="cannot be used"):
        flow.get(Lost.remote().call.remote())


def test_a_relative_folder_is_one_of_the_program(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    assert flow.get(shown.options(working_dir="below").remote())[1] == str(tmp_path / "below")


@pytest.mark.parametrize(("given", "error"), [
    ({"env_vars": "A=1"}, TypeError), ({"env_vars": {"A": 1}}, TypeError), ({"env_vars": {1: "A"}}, TypeError),
    ({"env_vars": {"": "1"}}, ValueError), ({"env_vars": {"A=B": "1"}}, ValueError),
    ({"env_vars": {"A": "\0"}}, ValueError), ({"working_dir": 5}, TypeError), ({"working_dir": ""}, ValueError),
    ({"working_dir": b"x"}, TypeError),
])  # fmt: skip
def test_bad_input_is_refused_at_once(given, error):
    with pytest.raises(error, match=next(iter(given))):
        shown.options(**given)


def test_a_replay_has_it(tmp_path):
    ref = shown.options(env_vars={"COLOUR": "red"}, working_dir=tmp_path).remote()
    assert flow.get(ref) == flow.replay(ref, debug=False) == ("red", str(tmp_path))
    assert "COLOUR" not in os.environ
    assert pathlib.Path.cwd() != tmp_path
