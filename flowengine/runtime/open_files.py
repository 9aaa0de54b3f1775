"""How many files a process may open, and how many an engine needs: links, pipes and values that are read."""

from __future__ import annotations

import errno
import os
import resource

from flowengine.errors import BadValue

OWN_FILES = 128  # of any process: links to others, values that it reads at once
WORKER_FILES = 3  # of a node for each of its workers: two pipes for what it prints, and a link
KEPT_FILES = 64  # of those of a node, which no worker is started with


def check_open_files(num_workers: int = 0, extra_workers: int = 0) -> None:
    """Raise BadValue when a process here may open fewer files than an engine with so many workers needs."""
    limit, workers = resource.getrlimit(resource.RLIMIT_NOFILE)[1], num_workers + extra_workers
    needed = OWN_FILES + WORKER_FILES * workers
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return
    why = how = ""
    if workers:
        why = (f" ({OWN_FILES}, and {WORKER_FILES} for each of {workers} workers: "
               f"num_workers={num_workers} and workers_extra_max={extra_workers})")
        how = ", or lower num_workers or workers_extra_max"
    raise BadValue(f"a process may open {limit} files here (`ulimit -Hn`), and {needed} are needed{why}: raise the "
                   f"limit (`ulimit -n {needed}`, LimitNOFILE= of a service, --ulimit nofile= of a container){how}")


def two_pipes() -> tuple[int, int, int, int]:
    """The ends (read, write, read, write) of two pipes; raises OSError when hardly any file could be opened then."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    made: tuple[int, ...] = ()
    try:
        made = os.pipe()
        made = (*made, *os.pipe())
        if limit != resource.RLIM_INFINITY and max(made) >= limit - KEPT_FILES:  # numbers are given from below
            raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: this process may have {limit} (`ulimit -n`)")
    except OSError:
        for fd in made:
            os.close(fd)
        raise
    return made[0], made[1], made[2], made[3]
