"""Errors: the tree, their texts, and that all of them arrive."""
from __future__ import annotations

import copy
import pickle
import threading
import traceback

import pytest

from flowengine import errors
from flowengine.errors import (
    ActorDied,
    ActorNotFound,
    AlreadyInitialized,
    BadType,
    BadValue,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    Deadlock,
    EngineBug,
    FlowError,
    GetTimeout,
    HeadLost,
    Lost,
    MemberLost,
    ObjectLost,
    OutOfDisk,
    SerializationError,
    StaleSession,
    Standin,
    StoreFull,
    TaskCancelled,
    TaskError,
    TaskTimeout,
    UsageError,
    WorkerCrashed,
    pack_error,
    traceback_text,
    unpack_error,
)

BASES = {
    UsageError: (FlowError,), BadValue: (UsageError, ValueError), BadType: (UsageError, TypeError),
    ConfigError: (UsageError, ValueError), AlreadyInitialized: (UsageError, ValueError),
    StaleSession: (UsageError, ValueError), SerializationError: (UsageError, TypeError), TaskError: (FlowError,),
    TaskCancelled: (FlowError,), TaskTimeout: (FlowError,), GetTimeout: (FlowError, TimeoutError),
    Deadlock: (FlowError,), Lost: (FlowError,),
    WorkerCrashed: (Lost,), ActorDied: (Lost,), ActorNotFound: (ActorDied,), ObjectLost: (Lost,), HeadLost: (Lost,),
    StoreFull: (FlowError,), OutOfDisk: (FlowError,), CollectiveError: (FlowError,),
    CollectiveMismatch: (CollectiveError,), CollectiveTimeout: (CollectiveError,), MemberLost: (CollectiveError,),
    EngineBug: (FlowError,),
}


class Odd(Exception):
    def __init__(self, code, *, reason):
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


class Prefixed(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")


class Slotted(Exception):
    __slots__ = ("place",)


class HoldsLock(ValueError):
    def __init__(self, text):
        super().__init__(text)
        self.lock, self.size = threading.Lock(), 7


class SpeaksBadly(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


class Registers(Exception):
    seen: list = []

    def __init_subclass__(cls, **kwargs):
        raise RuntimeError("this class must not be derived from")


class NewNeedsMore(Exception):
    def __new__(cls, *, must):
        return super().__new__(cls, must)

    def __init__(self, *, must):
        super().__init__(must)


class HasTask(Exception):
    def __init__(self, task):
        super().__init__(f"about {task}")
        self.task = task


class Explodes(Exception):
    def __reduce__(self):
        return explode, ()


class ReadOnlyPart(Exception):
    @property
    def remote_traceback(self):
        return "mine"


class Meta(type):
    def __new__(mcs, name, bases, body):
        if bases != (Exception,):
            raise TypeError("final")
        return super().__new__(mcs, name, bases, body)


class Final(Exception, metaclass=Meta):
    pass


def explode():
    raise SystemExit("while unpickling")


def caught(error, origin=None):
    """The error after it was raised in a function of a known name."""
    def place_of_fault():
        raise error from origin

    try:
        place_of_fault()
    except BaseException as raised:
        return raised


def travel(error, task="job"):
    return unpack_error(pack_error(error, task, traceback_text(error)))


def test_tree_is_complete_and_drawn():
    for kind, bases in BASES.items():
        assert all(issubclass(kind, base) for base in bases)
        assert kind.__name__ in errors.__doc__
        assert kind.__doc__


@pytest.mark.parametrize("kind", [FlowError, *BASES], ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_attributes_chain_and_notes(kind):
    error = kind("what happened")
    error.extra = {"a": [1]}
    error.add_note("a note")
    error.__cause__ = KeyError("first")
    error.__cause__.__context__ = Odd(1, reason="deep")
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(back) is kind
        assert str(back) == str(error)
        assert "what happened" in str(back)
        assert vars(back) == vars(error)
        assert back.__notes__ == ["a note"]
        assert isinstance(back.__cause__, KeyError)
        assert isinstance(back.__cause__.__context__, Odd)
        assert back.__suppress_context__


def test_crash_tells_all():
    error = WorkerCrashed(who="'crash'", host="n1", pid=77, exit_code=-9, attempt=2, attempts_max=2,
                          log_lines=["loading", "out of luck"], what_next="nothing: max_retries=1 is used up")
    back = pickle.loads(pickle.dumps(error))
    for piece in ("crash", "n1", "pid 77", "SIGKILL", "attempt 2 of 2", "  out of luck", "next: nothing"):
        assert piece in str(error)
    assert str(back) == str(error)
    assert (back.signal_name, back.exit_code, back.log_lines) == ("SIGKILL", -9, ("loading", "out of luck"))
    assert "exit code 3" in str(WorkerCrashed(who="f", exit_code=3))
    assert str(ActorDied("killed by kill()")) == "killed by kill()"
    with pytest.raises(TypeError, match="no field hots"):
        WorkerCrashed(hots="n1")


def test_full_store_gives_sizes_and_path():
    text = str(StoreFull("no room", needed_bytes=100 << 20, limit_bytes=50 << 20, path="/dev/shm/x"))
    assert text == "no room; needed 100.0 MiB, limit 50.0 MiB; path /dev/shm/x"
    assert str(EngineBug("odd", story=["first", "then"])) == "odd\n  first\n  then"
    assert "at value['deep']" in str(SerializationError("cannot pickle a lock", path="value['deep']"))


@pytest.mark.parametrize(("error", "match"), [
    (ZeroDivisionError("by nought"), "by nought"), (KeyError("root cause"), "root cause"),
    (Odd(7, reason="keyword only"), "7: keyword only"), (Prefixed(3), "^code 3"), (HoldsLock("held"), "held"),
    (FileNotFoundError(2, "No such file", "x.txt"), "x.txt"), (NewNeedsMore(must="have"), "have"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad start"), "bad start"),
    (Registers("r"), "r"), (ExceptionGroup("some", [ValueError(1), KeyError(2)]), "some"), (HasTask("t9"), "about t9"),
    (ReadOnlyPart("rop"), "rop"), (StoreFull("full", needed_bytes=5), "needed 5 bytes"),
    (ValueError("\ud800"), "ud800"),
    (SyntaxError("bad", ("f.py", 1, 2, "x y")), "bad")], ids=lambda value: type(value).__name__)
def test_user_error_keeps_type_text_and_place(error, match):
    back = travel(caught(error))
    for arrived in (back, pickle.loads(pickle.dumps(back)), TaskError.wrap(caught(error), "", "job")):
        with pytest.raises(type(error), match=match) as info:
            raise arrived
        assert isinstance(info.value, TaskError)
        assert type(error).__name__ in f"{type(arrived)} {arrived!r}"
        assert type(arrived.__cause__) is type(error)
        assert repr(arrived.args) == repr(error.args)
    assert "in place_of_fault" in str(back)
    assert type(travel(error)) is type(back)


def test_fields_laid_out_in_c_and_slots_are_kept():
    back = travel(FileNotFoundError(2, "No such file", "x.txt"))
    assert (back.errno, back.strerror, back.filename) == (2, "No such file", "x.txt")
    back = travel(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad start"))
    assert (back.object, back.start, back.reason) == (b"\xff", 0, "bad start")
    error = Slotted("s")
    error.place = "here"
    assert travel(error).place == "here"
    assert travel(Odd(7, reason="r")).code == 7
    group = travel(ExceptionGroup("some", [ValueError(1), KeyError(2)]))
    assert [type(part) for part in group.exceptions] == [ValueError, KeyError]
    inside = ExceptionGroup("more", [Odd(7, reason="r"), HoldsLock("l")])
    nested = travel(ExceptionGroup("some", [inside, OSError(2, "no")]))
    inner, other = nested.exceptions
    assert (inner.exceptions[0].code, type(inner.exceptions[1]), other.errno) == (7, HoldsLock, 2)


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
def test_what_ends_loops_and_futures_comes_wrapped(kind):
    back = travel(caught(kind(3)))
    assert type(back) is TaskError
    assert type(back.__cause__) is kind


def test_names_of_the_user_come_first():
    back = travel(HasTask("t9"), task="job")
    assert back.task == "t9"
    assert "remote traceback of task job" in str(back)
    plain = travel(caught(ValueError("v")), task="job")
    assert (plain.task, type(plain.cause)) == ("job", ValueError)
    assert "place_of_fault" in plain.remote_traceback


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(1), KeyboardInterrupt(), BaseException("x"),
                                   GeneratorExit(), BaseExceptionGroup("g", [SystemExit(2)])], ids=repr)
def test_leaving_is_a_plain_task_error_that_names_the_type(error):
    back = travel(caught(error))
    assert type(back) is TaskError
    assert type(error).__name__ in str(back)


def test_what_cannot_be_combined_falls_back_and_still_names_itself():
    back = travel(Final("last of its kind"))
    assert type(back) is TaskError
    assert str(back).startswith("Final: last of its kind")
    assert isinstance(back.cause, Final)


def test_packing_and_unpacking_never_fail():
    class Local(Exception):
        pass

    assert type(travel(SpeaksBadly()).cause) is SpeaksBadly
    assert "Explodes" in str(travel(Explodes("x")))
    assert "SystemExit" not in type(travel(Explodes("x"))).__name__
    assert isinstance(travel(Local("by value")), Local)
    local = Local(threading.Lock())
    assert "lock" in str(travel(local))
    assert travel(HoldsLock("h")).size == 7
    for junk in (b"", b"junk", pack_error(ValueError(1))[:-3], pickle.dumps(3)):
        assert isinstance(unpack_error(junk), EngineBug)
    assert isinstance(unpack_error(pack_error(ValueError("stray"))), TaskError)


def test_a_type_that_is_missing_at_the_receiver_becomes_a_standin(monkeypatch):
    blob = pack_error(Odd(7, reason="keyword only"), "job", "Traceback\n  in f")
    monkeypatch.delattr(f"{__name__}.Odd")
    back = unpack_error(blob)
    assert type(back) is TaskError
    assert type(back.cause) is Standin
    assert str(back).startswith("Odd: 7: keyword only")
    assert "Odd" in repr(back)
    assert str(pickle.loads(pickle.dumps(back))) == str(back)


def test_cause_and_context_chains_survive():
    root = caught(RuntimeError("outer"), caught(Odd(1, reason="x"), caught(KeyError("inner"))))
    back = travel(root)
    chain, error = [], back
    while error is not None:
        chain.append(type(error).__name__)
        error = error.__cause__ or error.__context__
    assert chain == ["TaskError(RuntimeError)", "RuntimeError", "Odd", "KeyError"]
    assert "inner" in "".join(traceback.format_exception(back))


def test_chains_may_be_rings_and_long():
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    back = travel(first)
    assert back.__cause__.__context__.__context__ is back.__cause__
    error = ValueError(0)
    for number in range(1, 200):
        following = ValueError(number)
        following.__cause__ = error
        error = following
    assert travel(error).args == (199,)


def test_tasks_that_wait_for_tasks_keep_type_and_root_and_stay_small():
    error, sizes = caught(Odd(7, reason="root")), []
    for level in range(100):
        blob = pack_error(error, f"task {level}", "Traceback:\n  in f\n")
        sizes.append(len(blob))
        error = caught(unpack_error(blob))
    assert isinstance(error, Odd)
    assert str(error).startswith("7: root")
    assert "task 99" in str(error)
    assert max(sizes) < 40_000
    assert isinstance(unpack_error(pack_error(error)), Odd)


def test_engine_errors_arrive_as_they_are_and_as_task_errors_when_user_code_raised_them():
    lost = ObjectLost("gone", who="o1", host="n1")
    assert type(unpack_error(pack_error(lost))) is ObjectLost
    back = travel(caught(lost))
    assert isinstance(back, TaskError)
    assert isinstance(back, ObjectLost)
    assert back.host == "n1"


def test_dependents_get_the_same_error_and_its_notes():
    error = travel(caught(KeyError("root cause")))
    error.add_note("while waiting")
    back = unpack_error(pack_error(error))
    assert (type(back), str(back), back.__notes__) == (type(error), str(error), ["while waiting"])
    assert type(error) is type(travel(KeyError("another")))


def engine_frame(code: str) -> dict:
    """What the code defines, as if it were a file of the engine."""
    names: dict = {"FlowError": FlowError}
    exec(compile(code, errors.PACKAGE + "runtime/some.py", "exec"), names)
    return names


def test_a_traceback_is_that_of_the_users_code():
    run = engine_frame("def run(code):\n    code()")["run"]
    get = engine_frame("def get():\n    raise FlowError('asked for')")["get"]
    slip = engine_frame("def slip():\n    return {}['bug']")["slip"]

    def users(call):
        return lambda: call()

    for call, shown in ((get, False), (slip, True), (lambda: 1 / 0, False)):
        with pytest.raises(Exception) as caught:
            run(users(call))
        caught.value.__traceback__ = caught.value.__traceback__.tb_next     # without this test's own frame
        text = traceback_text(caught.value)
        assert "return lambda: call()" in text
        assert "in run" not in text
        assert ("runtime/some.py" in text) is shown     # where it went wrong by itself


def test_a_traceback_of_the_engine_alone_is_kept():
    with pytest.raises(FlowError) as caught:
        engine_frame("def get():\n    raise FlowError('asked for')")["get"]()
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert "runtime/some.py" in traceback_text(caught.value)
