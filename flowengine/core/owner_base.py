"""What the parts of the Owner machine share: its state, and the rules of one part that another part calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from ..config import Config
from ..recovery.failures import Lives
from ..recovery.stash import Stash
from . import commands as c
from . import messages as m
from .copies import Persisting
from .journal import Journal
from .owner_state import (
    Cost,
    Demand,
    Exported,
    Gang,
    Lease,
    LongWait,
    Made,
    Obj,
    Parent,
    Placing,
    Queue,
    QueueKey,
    RefFound,
    RefsDropped,
    Stream,
    Submitted,
    Target,
    Task,
    Waiter,
)
from .past import Past

JOURNAL_ENTRIES = 5_000
SPANS_KEPT = 20_000  # runs for the timeline, of each kind
# What ran, at which worker and node, which run it was; submitted, began, took (microseconds); how it ended.
Run = tuple[m.TaskSpec, str, str, int, int, int, int, str]
INTERRUPTED = "crash"  # how a run ended that a death has ended; its times are those of the owner's clock
Repeat = tuple[m.TaskSpec, str, str, int]  # the first four of a run
COUNTERS = (
    "tasks_submitted", "tasks_executed", "tasks_retried", "objects_rebuilt", "objects_inlined", "stale_messages",
    "stash_entries_forwarded", "stash_entries_flushed", "actors_started", "actors_alive", "actor_restarts",
    "calls_executed", "calls_replayed", "checkpoints_taken", "objects_persisted",
)  # fmt: skip


class Functions:
    """Pickled functions by id; those that no live task names go, oldest first, when they grow over a bound."""

    def __init__(self, idle_bytes_max: int) -> None:
        self.blobs: dict[bytes, bytes] = {}
        self.users: dict[bytes, int] = {}
        self.idle: dict[bytes, None] = {}
        self.idle_bytes = 0
        self.idle_bytes_max = idle_bytes_max

    def use(self, function: bytes, blob: bytes | None) -> None:
        """A task names the function."""
        if blob is not None and function not in self.blobs:
            self.blobs[function] = blob
        self.users[function] = self.users.get(function, 0) + 1
        if function in self.idle:
            del self.idle[function]
            self.idle_bytes -= len(self.blobs[function])

    def leave(self, function: bytes) -> list[bytes]:
        """A task is done with the function; gives those that were forgotten now."""
        self.users[function] -= 1
        if self.users[function]:
            return []
        del self.users[function]
        self.idle[function] = None
        self.idle_bytes += len(self.blobs.get(function, b""))
        gone: list[bytes] = []
        while self.idle_bytes > self.idle_bytes_max and len(self.idle) > 1:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            self.idle_bytes -= len(self.blobs.pop(oldest, b""))
            gone.append(oldest)
        return gone


class OwnerBase(ABC):
    """State of an Owner. Mutated only below handle()."""

    def __init__(self, me: str, node: str, node_id: str, config: Config) -> None:
        self.me = me
        self.node = node  # address of this host's node
        self.node_id = node_id
        self.head = ""
        self.config = config
        self.out: list[Any] = []
        self.now = 0.0
        self.depth = 0  # of the tasks that are submitted here
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.spans: deque[Run] = deque(maxlen=SPANS_KEPT)
        self.call_spans: deque[Run] = deque(maxlen=SPANS_KEPT)  # calls, which may be many more, and actors that began
        self.journal = Journal(JOURNAL_ENTRIES)
        # tasks
        self.tasks: dict[bytes, Task] = {}
        self.functions = Functions(config.function_bytes_max)
        self.ending: deque[tuple[Task, m.Failed, str]] = deque()  # tasks that end badly in this event
        # objects, owned and borrowed
        self.objects: dict[bytes, Obj] = {}
        self.waiters: dict[int, Waiter] = {}
        self.withdrawn: dict[bytes, int] = {}  # tasks that end if they have not begun; who waits for the answer
        self.long_waits: dict[int, LongWait] = {}
        self.expected: dict[bytes, bytes] = {}  # objects that code which runs here again has yet to own -> its task
        self.orphans: dict[bytes, str] = {}  # objects that we adopted, with values -> the owner that died
        self.asked_of: dict[bytes, str] = {}  # wards -> the worker whose run of their parent may bring them
        self.promised: dict[bytes, None] = {}  # objects that will have a value here though no task makes them
        self.circles: dict[int, str] = {}  # waits that were broken since they would never have ended
        self.unannounced: dict[bytes, Obj] = {}  # borrowed, and the owner does not know about us yet
        self.read_last: tuple[m.Value | None, dict[bytes, m.RefTo]] = (None, {})  # a stored value, what is inside
        self.borrowed_by: dict[str, dict[bytes, Obj]] = {}  # borrower -> objects of ours that it holds
        self.unconfirmed: dict[tuple[str, bytes], list[Task]] = {}  # (owner, object): tasks that hold it until then
        self.fetch_errors: dict[bytes, str] = {}
        self.sought: dict[bytes, None] = {}  # objects of ours whose last copy is on a node that was silent
        # slots
        self.queues: dict[QueueKey, Queue] = {}
        self.leases: dict[tuple[str, int], Lease] = {}  # by node and number
        self.lent: dict[tuple[str, int], Lease] = {}  # the same, by worker and number
        self.costs: dict[bytes, Cost] = {}  # by function
        self.placing = Placing()
        self.gangs: dict[str, Gang] = {}
        self.sent_functions: dict[str, dict[bytes, None]] = {}  # by worker
        self.pipeline_us_max = int(config.pipeline_s_max * 1e6)
        self.parked: dict[tuple[QueueKey, str], Demand] = {}  # at nodes that are not asked now: dead, not needed
        self.know_no_actors()
        # logs
        self.stash = Stash(
            config.stash_flush_s, config.stash_bytes_max, config.stash_holders_max, config.calls_ahead_max,
            self.counters,
        )  # fmt: skip
        self.lives = Lives()  # of the processes leased here: how often such die
        self.polls = 0  # questions asked about the logs of dead actors
        self.nodes: tuple[str, ...] = ()  # addresses of those that live, as the head told last
        # losses
        self.dead: dict[str, None] = {}  # addresses of processes and nodes that are gone for good
        self.persisting = Persisting()
        self.parents: dict[bytes, Parent] = {}  # tasks whose code runs here
        self.left_children: dict[bytes, m.Value] = {}  # results that an earlier attempt of a parent left
        # replays in another process
        self.past = Past()
        self.keeps_records = False  # what fails is to be written to a file

    def know_no_actors(self) -> None:
        """What is known of actors, and of what they take along, before there are any."""
        self.made: dict[bytes, Made] = {}  # those that were made here
        self.targets: dict[bytes, Target] = {}  # those that are called from here
        self.repeats: dict[str, dict[bytes, Repeat]] = {}  # worker -> calls that were answered and are done again
        self.seqs_before: dict[tuple[bytes, bytes], int] = {}  # numbers used before a checkpoint: actor, caller
        self.tops: dict[bytes, dict[bytes, None]] = {}  # our tasks and actors -> actors that were made below them
        self.unheard: dict[bytes, str] = {}  # actors that were made here -> the driver that has yet to note each
        self.held_back: list[c.Send] = []  # until it has
        self.gated = False  # some of this is there, so what is sent passes gate()
        self.going_home: list[Obj] = []  # what goes to its owner inside of a value: it is held until that has left
        self.coming_home: list[bytes] = []  # what we own and give to ourselves inside of a value: until that has come

    def send(self, to: str, message: m.Message, lazy: bool = False) -> None:
        """Order a message to another process."""
        self.out.append(c.Send(to, message, lazy))

    def introduce(self, obj: Obj) -> None:
        """The owner of a borrowed object is told, by us or by others, that we hold it."""
        obj.introduced += 1
        self.unannounced.pop(obj.oid, None)

    # --- tasks ---

    @abstractmethod
    def current(self, task_id: bytes, attempt: int, sender: str = "") -> Task | None:
        """The task, if this attempt is the one that counts."""

    @abstractmethod
    def look_at_inputs(self, task: Task) -> None:
        """A WAITING task: count what is missing; go on when nothing is."""

    @abstractmethod
    def try_again(self, task: Task) -> None:
        """The attempt is over, the wish is not."""

    @abstractmethod
    def end_badly(self, task: Task, error: m.Failed, sender: str = "") -> None:
        """Every result of the task is this error."""

    @abstractmethod
    def settle(self, task: Task) -> None:
        """The task ended: what of its inputs is still held, and for what."""

    @abstractmethod
    def unpin_task(self, task: Task) -> None:
        """The run is over: its inputs are not held for it any more."""

    @abstractmethod
    def erase(self, task: Task) -> None:
        """Nothing is left of the task."""

    @abstractmethod
    def cancel(self, task: Task, force: bool, recursive: bool, again: bool = False) -> None:
        """The task is not wanted any more."""

    @abstractmethod
    def cancelled_error(self, task: Task, force: bool, again: bool) -> m.Failed:
        """The error of a task that is not wanted."""

    @abstractmethod
    def unhook(self, waiter: Waiter) -> None:
        """The waiter is done: objects that are still pending forget it."""

    @abstractmethod
    def is_borrowed(self, obj: Obj) -> bool:
        """Some other process holds it."""

    @abstractmethod
    def brought_again(self, obj: Obj) -> Task | None:
        """Our task below which code runs again that will bring the argument of an actor anew."""

    @abstractmethod
    def contains(self, outer: Obj, refs: tuple[m.RefTo, ...], sender: str) -> None:
        """Our object holds references."""

    @abstractmethod
    def ref_found(self, event: RefFound, sender: str) -> None:
        """A reference came from where nobody introduced us."""

    @abstractmethod
    def refs_dropped(self, event: RefsDropped, sender: str) -> None:
        """ObjectRef instances are gone."""

    @abstractmethod
    def bring_from_run(self, task: Task, worker: str) -> None:
        """The code that is to run there may make anew what its dead run owned."""

    @abstractmethod
    def turn_to(self, obj: Obj, ref: m.RefTo) -> None:
        """The borrowed object has a new owner."""

    @abstractmethod
    def bring_wards(self, task: Task, settled: bool) -> None:
        """The actor is back: it owns again what it owned."""

    @abstractmethod
    def actor_settles(self, made: Made) -> None:
        """The replay of an actor is over: what it has not made by now does not come."""

    @abstractmethod
    def wards_of(self, task: Task) -> list[Obj]:
        """Borrowed objects that wait for the task to bring a new owner."""

    @abstractmethod
    def asked_as_heir(self, event: m.HeirAsked, sender: str) -> Obj | None:
        """Code runs here again that made the object, or is about to."""

    @abstractmethod
    def set_value(self, obj: Obj, value: m.Value, sender: str) -> None:
        """The object has a value (again): whoever waits for it goes on."""

    @abstractmethod
    def stream_ended(self, task: Task, items: int) -> None:
        """The maker has ended; so many items came."""

    @abstractmethod
    def wake_stream(self, stream: Stream) -> None:
        """Readers look again."""

    @abstractmethod
    def drop_values(self, task_id: bytes, values: tuple[m.Value, ...], first: int = 0) -> None:
        """Results of an attempt that does not count."""

    # --- references ---

    @abstractmethod
    def release(self, first: Obj) -> None:
        """Some count of the object fell: free what nobody needs."""

    @abstractmethod
    def drop_lineage_of_inputs(self, task: Task) -> None:
        """The task's results cannot be lost any more."""

    @abstractmethod
    def leave_via(self, obj: Obj) -> None:
        """The container that kept the reference alive may go."""

    @abstractmethod
    def refuse(self, oid: bytes, value: m.Value) -> None:
        """A value that came and is not taken."""

    @abstractmethod
    def confirmed(self, task: Task) -> None:
        """One of the owners that the task's inputs wait for knows its borrower."""

    @abstractmethod
    def discard(self, value: m.Value, oids: list[bytes], stack: list[Obj] | None = None) -> None:
        """A value that nobody needs: drop its copies and the references inside of it."""

    @abstractmethod
    def want(self, missing: list[Obj]) -> None:
        """Somebody here waits for these: ask the owners, or have lost ones made again."""

    @abstractmethod
    def wake_fetchers(self, obj: Obj) -> None:
        """Local readers look again."""

    # --- slots ---

    @abstractmethod
    def ways_anew(self) -> None:
        """A node is gone: tasks that were to run beside an object look where it is now."""

    @abstractmethod
    def fill(self, queue: Queue) -> None:
        """Push what is ready to workers that take more; then ask for more slots, or give up what is too much."""

    @abstractmethod
    def lease_to_follow(self, task: Task, missing: list[Obj]) -> Lease | None:
        """The worker on which all missing inputs are under way, if it takes more."""

    @abstractmethod
    def push(self, lease: Lease, task: Task) -> None:
        """Send the task to the worker, and behind it what waits for it alone."""

    @abstractmethod
    def kill_forced(self, lease: Lease) -> None:
        """The lease's first task, if it was cancelled by force, is killed with its worker."""

    @abstractmethod
    def ask(self, queue: Queue) -> None:
        """Tell nodes how many slots would be of use."""

    @abstractmethod
    def tell_demand(self, queue: Queue, node: str, demand: Demand, outstanding: int) -> None:
        """So many slots more would be of use."""

    @abstractmethod
    def drop_lease(self, lease: Lease) -> None:
        """The worker is not ours any more."""

    @abstractmethod
    def return_lease(self, lease: Lease) -> None:
        """The worker is not needed: its node may give it to others."""

    @abstractmethod
    def forget_function(self, function: bytes) -> None:
        """The function's pickled form is gone here."""

    # --- records ---

    @abstractmethod
    def keep_chosen(self, task: Task, event: m.StashAdded) -> None:
        """A running task has chosen, or a child of it has ended."""

    @abstractmethod
    def keep_older(self, made: Made, former: m.Checkpoint | None) -> None:
        """A newer checkpoint takes the place of this one, and of choices before it."""

    @abstractmethod
    def keep_dead(self, made: Made) -> None:
        """The actor is dead for good."""

    @abstractmethod
    def keep_sent(self, target: Target) -> None:
        """An actor is dead that was called from here."""

    # --- actors ---

    @abstractmethod
    def why_task(self, task: Task) -> str:
        """One line: where the task is and what it waits for."""

    @abstractmethod
    def why_call(self, task: Task) -> str:
        """One line: what a call waits for."""

    @abstractmethod
    def worker_with(self, task: Task) -> str:
        """The process that runs the task or the call, if it was sent to one."""

    @abstractmethod
    def call_cut_short(self, task: Task) -> None:
        """A call was not done in full: a new incarnation must not do it."""

    @abstractmethod
    def adopt(self, obj: Obj) -> None:
        """The object is ours now."""

    @abstractmethod
    def exported(self, event: Exported, sender: str) -> None:
        """References leave: the receiver becomes a borrower before we let go."""

    @abstractmethod
    def hold_actor(self, task: Task) -> None:
        """The actor lives at least until its calls are answered."""

    @abstractmethod
    def count_adopted(self, task: Task) -> None:
        """A call whose result an earlier attempt of its caller left."""

    @abstractmethod
    def forget_numbers(self, caller: bytes) -> None:
        """The caller calls no more."""

    @abstractmethod
    def forget_actor(self, actor: bytes) -> None:
        """No handle of an actor that was made here is left."""

    @abstractmethod
    def caller_ended(self, caller: bytes) -> None:
        """A task that may have called actors is done."""

    @abstractmethod
    def number_anew(self, caller: bytes) -> None:
        """The caller begins anew: its calls have the numbers that they had."""

    @abstractmethod
    def actor_lost(self, task: Task, death: m.Death) -> None:
        """The actor's process is dead."""

    @abstractmethod
    def actor_cancelled(self, task: Task) -> bool:
        """Whether the cancelled task is an actor, which ends before it began."""

    @abstractmethod
    def actor_pinned(self, task: Task) -> None:
        """No handle of the actor is left here; what pins it may be there for the actor alone."""

    @abstractmethod
    def actor_unneeded(self, task: Task) -> bool:
        """No handle and no call is left: the actor ends, unless it is detached."""

    @abstractmethod
    def is_held(self, task: Task) -> bool:
        """Whether it is a call that is kept with its inputs for a replay."""

    @abstractmethod
    def target_gone(self, actor: bytes) -> None:
        """No handle of a foreign actor is left here."""

    @abstractmethod
    def poll(self, made: Made, worker: str) -> None:
        """Ask every process what it holds of the dead actor's log."""

    @abstractmethod
    def hear_place(self, actor: m.RefTo, place: int, sender: str) -> None:
        """A reply tells how far its actor came."""

    @abstractmethod
    def tell_callers_known(self, made: Made) -> None:
        """The new incarnation may run calls again."""

    @abstractmethod
    def introduced_by_maker(self, obj: Obj, ref: m.RefTo) -> None:
        """Whoever made what holds this reference has told its owner about us."""

    @abstractmethod
    def make_elsewhere(self, event: Submitted) -> None:
        """User code in a worker made an actor."""

    @abstractmethod
    def makers_leave(self, parent: Parent) -> None:
        """The parent stops before its end."""

    @abstractmethod
    def awaits_maker(self, made: Made) -> bool:
        """Whether the code that made the actor is to run again."""

    @abstractmethod
    def maker_is_back(self, actor: bytes, worker: str) -> None:
        """An actor that makes others has done again what it had done."""

    @abstractmethod
    def driver_died(self, address: str) -> None:
        """Nobody will note actors that were made here."""

    @abstractmethod
    def top_ended(self, task: Task) -> None:
        """Nobody below this task will run again."""

    @abstractmethod
    def actor_settled(self, task: Task) -> None:
        """The task of an actor is over."""

    @abstractmethod
    def actor_peer_died(self, address: str) -> None:
        """A caller or an owner of actors is dead."""

    @abstractmethod
    def end_later(self, task: Task, error: m.Failed) -> None:
        """As end_badly, for a task that may be queued or running."""

    @abstractmethod
    def beside_dead(self, actor: bytes, error: bytes) -> None:
        """The actor is dead for good: what can run only beside it ends."""

    @abstractmethod
    def known(self, ref: m.RefTo) -> Obj:
        """The record of a reference that this process holds."""

    # --- durable copies ---

    @abstractmethod
    def weigh(self, task: Task, obj: Obj, run_us: int, worker: str) -> None:
        """A result was stored: whether it would be too dear to make again."""

    @abstractmethod
    def restore(self, obj: Obj) -> None:
        """Bring the durable copy back into a store."""

    @abstractmethod
    def drop_durable(self, oid: bytes) -> None:
        """The object is not needed any more: nor is a durable copy that the engine chose to make."""

    @abstractmethod
    def why_persisted(self, obj: Obj) -> list[str]:
        """What an object would cost to make again and to write, and what follows from that."""

    @abstractmethod
    def is_job(self, parent: bytes) -> bool:
        """Whether the results of this parent's children are journaled."""

    # --- losses ---

    @abstractmethod
    def rebuild(self, lost: list[Obj]) -> None:
        """Make lost objects again."""

    @abstractmethod
    def resend(self, item: Obj) -> None:
        """An item of a stream that still runs was lost."""

    @abstractmethod
    def copies_lost(self, obj: Obj, nodes: tuple[str, ...], silent: tuple[str, ...] = ()) -> None:
        """These nodes do not have the object."""

    @abstractmethod
    def answer_watchers(self, obj: Obj, value: m.Value) -> None:
        """Whoever asked for the value gets it."""

    @abstractmethod
    def owner_died(self, obj: Obj) -> None:
        """The owner of a borrowed object is dead."""

    @abstractmethod
    def lost_error(self, what: Obj | bytes, why: str) -> m.Failed:
        """The packed ObjectLost of an object that cannot be made again."""

    @abstractmethod
    def set_fetch_error(self, obj: Obj, reason: str) -> None:
        """The local store can never hold the object."""

    @abstractmethod
    def is_awaited(self, obj: Obj) -> bool:
        """Somebody here or a borrower waits for the object."""

    @abstractmethod
    def ward(self, obj: Obj, task: Task) -> None:
        """The task would bring the borrowed object again if its owner died."""

    @abstractmethod
    def unward(self, obj: Obj) -> Task | None:
        """The object does not need its parent task any more; gives the task."""

    @abstractmethod
    def drop_unneeded(self, task: Task, stack: list[Obj]) -> None:
        """Forget the task if it has ended, and neither a result nor what it would bring again is left."""

    @abstractmethod
    def add_borrower(self, obj: Obj, borrower: str, count: int) -> None:
        """So many introductions more of this process."""

    @abstractmethod
    def begin_rebuild(self, task: Task) -> None:
        """A task that is done has to run again."""

    @abstractmethod
    def take_children(self, task: Task) -> None:
        """Results of children outlive the worker that owned them, until their parent has ended."""

    @abstractmethod
    def look_again(self, task: Task) -> None:
        """The task has ended; if it was submitted again meanwhile it begins anew."""

    @abstractmethod
    def submitted(self, event: Submitted, sender: str) -> None:
        """User code called a remote function."""

    @abstractmethod
    def stash_child(self, obj: Obj, value: m.Value) -> None:
        """A child's result: the parent's owner holds it until the parent has ended."""
