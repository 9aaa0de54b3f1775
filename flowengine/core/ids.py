"""Names of tasks and objects: hashes that a parent which runs again computes again.

A task is named by 16 bytes, the hash of its parent's name and of how many children the parent had made before it.
An object is named by its task and a return index, 20 bytes. A value that is put counts as a child with one return.
"""

from __future__ import annotations

import hashlib

TaskId = bytes
ObjectId = bytes
Address = str  # "tcp://127.0.0.1:4321#5f0c91aa": where a process listens and which life of it is meant
NodeId = str

TASK_ID_BYTES = 16
FIRST = bytes(4)  # the return index 0, of nearly every object


def child_id(parent: TaskId, index: int) -> TaskId:
    """Name of the index-th child (task or put value) of a task."""
    return hashlib.blake2b(parent + index.to_bytes(8, "big"), digest_size=TASK_ID_BYTES).digest()


def root_id(seed: bytes) -> TaskId:
    """Name of a program's root task: random bytes, or a job's name when the job is to be resumable."""
    return hashlib.blake2b(seed, digest_size=TASK_ID_BYTES, person=b"flow-root").digest()


def function_id(blob: bytes) -> bytes:
    """Name of a function's pickled form, under which it is sent to a worker once."""
    return hashlib.blake2b(blob, digest_size=16, person=b"flow-fn").digest()


def object_id(task: TaskId, index: int) -> ObjectId:
    """Name of the index-th return of a task."""
    return task + (index.to_bytes(4, "big") if index else FIRST)


def task_of(oid: ObjectId) -> TaskId:
    """The task (or put) that an object's name belongs to."""
    return oid[:TASK_ID_BYTES]


def index_of(oid: ObjectId) -> int:
    """The return index in an object's name."""
    return int.from_bytes(oid[TASK_ID_BYTES:], "big")


def short(name: bytes) -> str:
    """A name as people read it: the first 12 hex digits, and the return index when there is one."""
    text = name[:TASK_ID_BYTES].hex()[:12]
    return text if len(name) <= TASK_ID_BYTES else f"{text}.{index_of(name)}"
