"""flow.dask_get: graphs of every kind, errors, what is sent and kept, order, callbacks."""
from __future__ import annotations

import gc
import operator
import os
import subprocess
import sys
import threading
import time
import types
import weakref

import dask
import dask.array as da
import dask.bag as db
import msgspec
import numpy as np
import pytest
from dask import delayed
from dask._task_spec import Alias, DataNode, List, Task, TaskRef
from dask.callbacks import Callback
from dask.diagnostics import ProgressBar

import flowengine as flow
from flowengine import asking
from flowengine.errors import BadType, BadValue, SerializationError
from flowengine.interop.dask_graph import Parts, graph_of, is_sent_by_value
from flowengine.interop.nodes import run_nodes
from flowengine.refs import current_session
from tests.cluster.kit import two_workers, until
from tests.runtime.kit import PROJECT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]


@pytest.fixture(scope="module", autouse=True)
def engine():
    yield from two_workers()


@pytest.fixture(autouse=True)
def scheduler():
    with dask.config.set(scheduler=flow.dask_get):
        yield


def square(x):
    return x * x


def units(graph, wanted, fuse=True):
    return Parts(graph_of(graph, set(graph)), wanted, fuse).units


# what becomes of a graph


def test_chains_become_one_task_and_branches_do_not():
    graph = {"a": (square, 2), "b": (square, "a"), "c": (square, "b"), "d": (operator.add, "b", "c"),
             "e": (square, "d")}
    assert {key: list(unit.nodes) for key, unit in units(graph, ["e"]).items()} == {
        "b": ["a", "b"], "c": ["c"], "e": ["d", "e"]}
    assert list(units(graph, ["e"], fuse=False)) == ["a", "b", "c", "d", "e"]
    assert "d" in units(graph, ["d", "e"])  # who is asked for it keeps a task of its own
    assert list(units(graph, ["a"])) == ["a"]


def test_containers_go_with_those_who_use_them_and_do_not_repeat_work():
    graph = {"a": (square, 2), "l": ["a", "a"], "s": (sum, "l"), "t": (len, "l")}
    found = units(graph, ["s", "t"])
    assert {key: list(unit.nodes) for key, unit in found.items()} == {"a": ["a"], "s": ["l", "s"], "t": ["l", "t"]}
    assert list(found["s"].needs) == ["a"]


def test_where_only_parts_of_a_value_are_needed_its_task_gives_these():
    graph = {"a": (divmod, 7, 2), "q": (operator.getitem, "a", 0), "r": (dict.get, "a", 1, 0), "s": (square, "q"),
             "t": (operator.add, "q", "r")}
    made = units(graph, ["r", "s", "t"])["a"]
    assert set(made.results) == {"q", "r"}
    assert list(made.nodes) == ["a", *made.results]
    for more, wanted, fuse in (
        ({"u": (sum, "a")}, ["r", "s", "t", "u"], True),                             # all of it is needed, too
        ({}, ["a", "r", "s", "t"], True),
        ({"u": (operator.getitem, "a", slice(1))}, ["r", "s", "t", "u"], True),      # slices may overlap
        ({"a": ["b", "c"], "b": (square, 1), "c": (square, 2)}, ["r", "s", "t"], True),  # made by each of its users
        ({}, ["r", "s", "t"], False),
    ):
        assert all(unit.results == (key,) for key, unit in units({**graph, **more}, wanted, fuse).items())


def test_a_long_chain_is_cut_in_time_that_grows_with_its_length():
    def cut_s(length):
        graph = {("a", 0): (square, 1), **{("a", i): (operator.add, ("a", i - 1), i) for i in range(1, length)}}
        began_s = time.thread_time()
        parts = Parts.__new__(Parts)
        parts.graph, parts.places = graph_of(graph, set(graph)), {key: place for place, key in enumerate(graph)}
        parts.targets, parts.constants, parts.wanted, parts.units = {}, {}, {("a", length - 1): None}, {}
        parts.make_units(True)
        assert [len(unit.nodes) for unit in parts.units.values()] == [length]
        return time.thread_time() - began_s

    assert min(cut_s(8000) for _ in range(3)) < 8 * min(cut_s(2000) for _ in range(3))


def test_what_a_chain_has_made_is_let_go_when_the_next_node_has_it():
    class Made:
        pass

    def make(*_):
        made = Made()
        seen.append(weakref.ref(made))
        return made

    def alive(*_):
        return sum(one() is not None for one in seen)

    seen: list[weakref.ref[Made]] = []
    nodes = [("a", Task("a", make)), ("b", Task("b", make, TaskRef("a"))), ("c", Task("c", make, TaskRef("b"))),
             ("d", Task("d", alive, TaskRef("c"), TaskRef("x")))]
    known = {"x": 1}
    run_nodes(nodes, known)
    assert known == {"d": 1}


def test_what_is_missing_or_a_circle_is_told():
    with pytest.raises(KeyError):
        flow.dask_get({"a": 1}, "b")
    with pytest.raises(ValueError, match="Missing dependency"):
        flow.dask_get({"a": Task("a", square, TaskRef("b"))}, "a")
    with pytest.raises(RuntimeError, match="Cycle"):
        flow.dask_get({"a": (square, "b"), "b": (square, "a")}, "a")
    with pytest.raises(BadType, match="Dask graph"):
        flow.dask_get(3, "a")


def test_a_future_of_a_dask_client_is_told_from_what_is_missing(monkeypatch):
    client = types.SimpleNamespace(futures={"b": None})
    clients = types.SimpleNamespace(Client=types.SimpleNamespace(current=lambda: client))
    monkeypatch.setitem(sys.modules, "distributed.client", clients)
    for need, told in (("b", "a: a Dask client has it"), ("c", "a$")):
        with pytest.raises(ValueError, match=f"Missing dependency {need} for dependents {told}"):
            flow.dask_get({"a": Task("a", square, TaskRef(need))}, "a")


def test_code_that_travels_is_told_from_names():
    assert not is_sent_by_value(operator.add)
    assert not is_sent_by_value(np.sum)
    assert is_sent_by_value(lambda: 1)


# values


def test_keys_within_lists_aliases_constants_and_old_tuples():
    graph = {"a": 1, "b": (operator.add, "a", 2), "c": ["a", "b"], "d": Alias("d", "b"), "e": DataNode("e", [1, 2]),
             "f": Task("f", sum, List(TaskRef("b"), TaskRef("d"))), ("t", 0): (square, "f")}
    assert flow.dask_get(graph, ["a", ["b", "c"], [["d"], "e"], "f", ("t", 0), "b"]) == (
        1, (3, [1, 3]), ((3,), [1, 2]), 6, 36, 3)
    assert flow.dask_get(graph, "d") == 3
    assert flow.dask_get(graph, []) == ()
    assert flow.dask_get(graph, "b", cache={"a": 10}) == 12


def test_collections_and_a_writable_result():
    x = da.random.default_rng(0).random((400, 400), chunks=(100, 100))
    total = (x @ x.T).sum(axis=0)
    assert np.allclose(total.compute(), total.compute(scheduler="sync"))
    ones = da.ones((300, 300), chunks=100).compute()
    ones += 1
    assert ones.sum() == 180_000
    assert db.from_sequence(range(100), npartitions=7).map(square).filter(lambda v: v % 2).sum().compute() == sum(
        i * i for i in range(1, 100, 2))
    assert delayed(sum)([delayed(square)(i) for i in range(5)]).compute() == 30
    assert dask.compute(delayed({"a": delayed(square)(3)}), [delayed(square)(4)]) == ({"a": 9}, [16])


def test_frames():
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    frame = pd.DataFrame({"k": list("abca") * 25, "v": range(100)})
    got = dd.from_pandas(frame, npartitions=5).groupby("k").v.sum().compute()
    assert got.to_dict() == frame.groupby("k").v.sum().to_dict()


def test_parts_of_one_value():
    halves = delayed(lambda n: {"a": np.arange(n), "b": [n], 3: "c"})(5)
    first, second = halves["a"], halves["b"]
    total, whole = dask.compute(delayed(sum)([first.sum(), second[0]]), second)
    assert (total, whole) == (15, [5])
    with pytest.raises(KeyError, match="d"):
        dask.compute(halves["a"], halves["d"])
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    frame = dd.from_pandas(pd.DataFrame({"k": np.arange(60) % 7, "x": np.arange(60)}), npartitions=5)
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        merged = frame.merge(frame, on="k").compute()
    assert len(merged) == sum(int(count) ** 2 for count in np.bincount(np.arange(60) % 7))


def test_a_large_constant_and_a_function_are_stored_once(monkeypatch):
    array, sent = np.arange(1 << 17), []
    from flowengine.objects import codec

    pack = codec.pack
    monkeypatch.setattr(codec, "pack", lambda value: sent.append(value) or pack(value))

    def picked(values, index):
        return int(values[index])

    graph = {"x": array, **{index: Task(index, picked, TaskRef("x"), index) for index in range(20)}}
    assert flow.dask_get(graph, list(range(20))) == tuple(range(20))
    assert sum(value is array for value in sent) == 1
    assert sum(value is picked for value in sent) == 1


def test_results_are_let_go_as_soon_as_nobody_needs_them():
    gc.collect()  # errors of other tests hold frames, and these values
    graph = {("x", 0): (np.ones, 1 << 20)}  # 8 MiB each
    graph.update({("x", i): (operator.add, ("x", i - 1), ("x", i - 1)) for i in range(1, 8)})
    peaks = []

    class Look(Callback):
        def _posttask(self, key, value, dsk, state, worker):
            peaks.append(len(state["finished"]) - len(state["released"]))

    with Look():
        assert flow.dask_get(graph, ("x", 7))[0] == 128
    assert max(peaks) <= 2
    assert flow.dask_get({"a": (np.ones, 1 << 20), "b": (np.sum, "a")}, "b") == 1 << 20
    shared = lambda x: x + 1  # noqa: E731
    assert flow.dask_get({"a": (shared, 1), "b": (shared, "a"), "c": (shared, "a")}, ["b", "c"]) == (3, 3)
    until(lambda: not any(obj.local for obj in current_session().owner.objects.values()))


def test_the_order_is_depth_first():
    order = []
    graph = {}
    for branch in range(12):
        graph[("load", branch)] = (np.ones, 10)
        graph[("use", branch)] = (np.sum, ("load", branch))
    graph["all"] = (sum, [("use", branch) for branch in range(12)])

    class Note(Callback):
        def _pretask(self, key, dsk, state):
            order.append(key)

    with Note():
        assert flow.dask_get(graph, "all", num_workers=1) == 120
    assert [key[0] for key in order[:6]] == ["load", "use"] * 3


# errors


def test_errors_keep_their_types_and_end_the_rest(tmp_path):
    def wait_for_ever():
        while not (tmp_path / "never").exists():
            time.sleep(0.01)

    with pytest.raises(ZeroDivisionError) as raised:
        delayed(divmod)(1, 0).compute()
    assert type(raised.value) is ZeroDivisionError
    assert str(raised.value) == "integer division or modulo by zero"
    assert "remote traceback" in str(raised.value.__cause__)
    with pytest.raises(ZeroDivisionError):
        dask.compute(delayed(wait_for_ever)(), delayed(divmod)(1, 0))
    until(lambda: flow.available_resources()["CPU"] == 2)


def test_what_cannot_be_sent_is_told_with_its_key():
    with pytest.raises(SerializationError, match=r"'b'.*lock"):
        flow.dask_get({"a": threading.Lock(), "b": (id, "a")}, "b")
    with pytest.raises(SerializationError, match=r"'b'.*lock"):
        flow.dask_get({"b": (id, threading.Lock())}, "b")
    with pytest.raises(SerializationError, match="lock"):
        flow.dask_get({"b": (threading.Lock,)}, "b")
    assert flow.dask_get({"b": (square, 3)}, "b") == 9


def test_options_of_tasks(tmp_path):
    def dies_once():
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os._exit(1)
        return 1

    assert delayed(dies_once)().compute() == 1
    with pytest.raises(flow.WorkerCrashed):
        delayed(os._exit)(1).compute(max_retries=0)
    with pytest.raises(BadValue, match="num_cpus"):
        delayed(square)(1).compute(num_cpus=-1)
    with pytest.raises(BadValue, match="num_workers"):
        delayed(square)(1).compute(num_workers=0)


def test_shuffles_that_cannot_work_are_refused_and_those_by_disk_are_not_tried_again(monkeypatch, tmp_path):
    class maybe_buffered_partd:
        def __call__(self):
            with open(tmp_path / "rows", "a") as rows:
                rows.write("x")
            os._exit(1)

    with pytest.raises(flow.WorkerCrashed):
        flow.dask_get({"a": (maybe_buffered_partd(),)}, "a")
    assert (tmp_path / "rows").read_text() == "x"
    here = flow.nodes()[0]
    monkeypatch.setattr(asking, "nodes", lambda session: [here, msgspec.structs.replace(here, host="elsewhere")])
    with pytest.raises(BadValue, match=r"one host only.*dataframe\.shuffle\.method"):
        flow.dask_get({"a": (maybe_buffered_partd(),)}, "a")
    monkeypatch.setattr(square, "__module__", "distributed.shuffle._core")
    with pytest.raises(BadValue, match="p2p"):
        flow.dask_get({"a": (square, 1)}, "a")


# callbacks, tasks, without an engine


def test_callbacks_see_all(capsys):
    seen = []
    callback = Callback(
        start=lambda dsk: seen.append("start"), start_state=lambda dsk, state: seen.append(len(state["ready"])),
        pretask=lambda key, dsk, state: seen.append(("pre", key)),
        posttask=lambda key, value, dsk, state, worker: seen.append((key, value)),
        finish=lambda dsk, state, failed: seen.append(failed))
    graph = {"a": 2, "b": (square, "a"), "c": (square, "b")}
    with callback:
        assert flow.dask_get(graph, "c") == 16
    assert seen == ["start", 1, ("pre", "b"), ("b", 4), ("pre", "c"), ("c", 16), False]
    seen.clear()
    with callback, pytest.raises(ZeroDivisionError):
        flow.dask_get({"a": (divmod, 1, 0)}, "a")
    assert seen[-1] is True
    with ProgressBar():
        delayed(sum)([delayed(square)(i) for i in range(20)]).compute()
    assert "100% Completed" in capsys.readouterr().out


def test_nodes_see_the_configuration_of_the_program():
    def seen(key):
        return dask.config.get(key, None)

    calls = [delayed(seen)(key) for key in ("mine.answer", "array.chunk-size", "mine.lock", "scheduler")]
    with dask.config.set({"mine.answer": 42, "array.chunk-size": "7MiB"}):
        assert dask.compute(*calls[:2]) == (42, "7MiB")
    with dask.config.set({"mine.lock": threading.Lock()}):              # cannot be sent
        assert dask.compute(*calls) == (None, "128MiB", None, None)


def test_in_a_task():
    @flow.remote
    def outer(count):
        return delayed(sum)([delayed(square)(i) for i in range(count)]).compute(scheduler=flow.dask_get)

    assert flow.get([outer.remote(count) for count in (3, 4)], timeout=60) == [5, 14]


def test_it_starts_the_default_engine():
    program = "import flowengine as flow; print(flow.dask_get({'a': (sum, [1, 2])}, 'a'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("3\n", "")
