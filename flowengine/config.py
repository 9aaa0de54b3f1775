"""All limits of the engine in one frozen struct; what cannot hold is refused when it is made."""
from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flowengine.errors import BadType, BadValue, ConfigError
from flowengine.options import real, unknown_name, whole

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ENVIRONMENT_PREFIX = "FLOWENGINE_"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Limits; names end in their unit."""

    # What travels inside messages.
    inline_bytes_max: int = 64 * KIB            # results up to it live with the owner, larger ones in the store
    link_unacked_bytes_max: int = 64 * MIB      # per link; senders wait beyond it

    # Who is dead. A closed socket is certain; these are for silence.
    heartbeat_s: float = 0.5
    suspect_after_s: float = 10.0               # silence of a worker or node before it is judged
    link_lost_after_s: float = 20.0             # a link that did not come back is given up, its peer is dead
    connect_timeout_s: float = 10.0
    stop_grace_s: float = 2.0                   # between asking a process to end and killing it

    # Leases and queues.
    lease_idle_s: float = 0.25                  # an unused slot goes back after it
    pipeline_s_max: float = 0.005               # run time of the work that may wait at a worker
    pipeline_tasks_max: int = 256
    stream_items_max: int = 64                  # items of a stream that nobody has taken yet
    workers_extra_max: int = 256                # workers beyond the slots and those of actors
    worker_idle_s: float = 5.0                  # an idle worker beyond the slots ends after it
    worker_start_s_max: float = 30.0            # a worker that does not listen by then is killed
    report_interval_s: float = 0.1              # of a node's news to the head, at most so often
    seek_interval_s: float = 0.25               # between two attempts to have one demand served elsewhere
    starve_s: float = 2.0                       # then slots are held free for a demand that needs several at once
    function_bytes_max: int = 64 * MIB          # pickled functions that no live task names, kept by an owner

    # Trying again.
    restart_delay_s: float = 0.1                # of a worker that died while it started; doubles with each
    restart_delay_s_max: float = 5.0
    rebuilds_max: int = 1_000                   # of one task, for results that were lost

    # The store.
    store_fraction: float = 0.3                 # of the host's memory, where object_store_bytes is not given
    pool_fraction: float = 0.25                 # of the store kept as warm free segments
    spill_chunk_bytes: int = 1 * MIB
    spill_parallel_max: int = 4                 # objects written to disk at once
    spill_limit_bytes: int = 0                  # on disk per node; 0: until the disk is full
    store_full_s: float = 5.0                   # without any room coming free; then asking for room fails

    # Between hosts.
    chunk_bytes: int = 4 * MIB
    pull_parallel_max: int = 8                  # objects that a node pulls at once
    transfer_timeout_s: float = 15.0            # without a byte; then another source is tried

    # Collectives.
    collective_inline_bytes_max: int = 32 * KIB     # contributions up to it are folded by the ledger of the group
    collective_piece_bytes: int = 256 * KIB         # what is folded and sent on at once
    collective_kept_bytes_max: int = 4 * GIB        # results of a group kept on a node for members that may come again

    # Recovery.
    stash_bytes_max: int = 16 * MIB             # then what is sent waits for the journal
    stash_flush_s: float = 0.1                  # entries wait so long for others before they go to the journal
    stash_holders_max: int = 2                  # entries that so many processes hold are not carried on; 0: no limit
    calls_ahead_max: int = 1_000_000            # calls that an actor begins before the journal has them; 0: write-first
    journal_delay_s: float = 0.0                # laboratory: a journal that takes so long to confirm

    persist_bytes_max: int = 16 * GIB           # of results in durable storage, by one owner; 0: none is written
    node_mtbf_s: float = 864_000.0              # how long a node is expected to last, before any was seen to end

    # Seeing.
    wait_warn_s: float = 10.0                   # a wait that lasts so long says why, in the log; 0: none does
    log_lines_kept: int = 20                    # per worker, for the account of its death
    log_line_chars_max: int = 4_096
    log_file_bytes_max: int = 4 * MIB           # of what a worker prints, kept on its host; 0: nothing
    story_lines_max: int = 10_000
    page_port: int = 0                          # of the head's live page; 0: any, from when somebody asks for it on
    metrics_port: int = 0                       # of the head's metrics without a token, on its own host; 0: none

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            _in_bounds(name, getattr(self, name), low, high)
        for smaller, factor, larger, reason in RELATIONS:
            if getattr(self, larger) < factor * getattr(self, smaller):
                times = "" if factor == 1 else f"{factor} x "
                raise ConfigError(f"{larger}={getattr(self, larger)} must be at least {times}"
                                  f"{smaller}={getattr(self, smaller)}: {reason}")


BOUNDS: dict[str, tuple[float, float]] = {
    "inline_bytes_max": (0, 16 * MIB),
    "link_unacked_bytes_max": (4 * KIB, 64 * GIB),
    "heartbeat_s": (0.01, 60),
    "suspect_after_s": (0.04, 3_600),
    "link_lost_after_s": (0.04, 86_400),
    "connect_timeout_s": (0.1, 600),
    "stop_grace_s": (0, 600),
    "lease_idle_s": (0, 3_600),
    "pipeline_s_max": (0, 60),
    "pipeline_tasks_max": (1, 65_536),
    "stream_items_max": (1, 1_000_000),
    "workers_extra_max": (1, 65_536),
    "worker_idle_s": (0, 86_400),
    "worker_start_s_max": (0.1, 3_600),
    "report_interval_s": (0, 60),
    "seek_interval_s": (0.01, 60),
    "starve_s": (0.01, 3_600),
    "function_bytes_max": (0, 64 * GIB),
    "restart_delay_s": (0, 3_600),
    "restart_delay_s_max": (0, 3_600),
    "rebuilds_max": (0, 1_000_000_000),
    "store_fraction": (0.001, 0.95),
    "pool_fraction": (0, 0.9),
    "spill_chunk_bytes": (4 * KIB, GIB),
    "spill_parallel_max": (1, 1_024),
    "spill_limit_bytes": (0, 1 << 60),
    "store_full_s": (0.01, 3_600),
    "chunk_bytes": (4 * KIB, GIB),
    "pull_parallel_max": (1, 1_024),
    "transfer_timeout_s": (0.1, 3_600),
    "collective_inline_bytes_max": (0, MIB),
    "collective_piece_bytes": (64, GIB),
    "collective_kept_bytes_max": (0, 1 << 60),
    "stash_bytes_max": (KIB, 64 * GIB),
    "stash_flush_s": (0, 60),
    "stash_holders_max": (0, 1_000_000),
    "calls_ahead_max": (0, 1_000_000_000),
    "journal_delay_s": (0, 60),
    "persist_bytes_max": (0, 1 << 60),
    "node_mtbf_s": (0.1, 1e10),
    "wait_warn_s": (0, 1e9),
    "log_lines_kept": (0, 10_000),
    "log_line_chars_max": (80, MIB),
    "log_file_bytes_max": (0, 64 * GIB),
    "story_lines_max": (1, 100_000_000),
    "page_port": (0, 65_535),
    "metrics_port": (0, 65_535),
}

# (smaller, factor, larger, why): larger >= factor * smaller.
RELATIONS: tuple[tuple[str, int, str, str], ...] = (
    ("heartbeat_s", 4, "suspect_after_s", "fewer missed heartbeats happen on a busy machine"),
    ("suspect_after_s", 1, "link_lost_after_s", "a link is given up after its peer was suspected, not before"),
    ("restart_delay_s", 1, "restart_delay_s_max", "the delay grows"),
)

WHOLE = {field.name: isinstance(field.default, int) for field in msgspec.structs.fields(Config)}


def make_config(given: Mapping[str, object] | Config | None = None) -> Config:
    """The limits with the given ones in place of the defaults; raises ConfigError or BadType."""
    if given is None:
        return Config()
    if isinstance(given, Config):
        return given
    if not isinstance(given, Mapping):
        raise BadType(f"config must be a dict or a Config, not {given!r}")
    for name in given:
        if name not in WHOLE:
            raise ConfigError(unknown_name("limit", name, WHOLE))
    checked = {name: _in_bounds(name, value, *BOUNDS[name]) for name, value in given.items()}
    return msgspec.structs.replace(Config(), **checked)


def from_environment(environ: Mapping[str, str]) -> dict[str, float]:
    """The limits set as FLOWENGINE_NAME=value; other names with the prefix are left alone unless they look misspelt."""
    found: dict[str, float] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name not in WHOLE:
            message = unknown_name("limit", name, WHOLE)
            if "did you mean" in message and _close(name):
                raise ConfigError(f"environment variable {variable}: {message}")
            continue
        try:
            number = int(text) if WHOLE[name] else float(text)
        except ValueError as error:
            kind = "whole number" if WHOLE[name] else "number"
            raise ConfigError(f"environment variable {variable} must be a {kind}, not {text!r}") from error
        found[name] = _in_bounds(name, number, *BOUNDS[name])
    return found


def _close(name: str) -> bool:
    """Whether a name is a limit without its unit, or but for the order of its words."""
    words = sorted(name.split("_"))
    return any(known.startswith(name + "_") or sorted(known.split("_")) == words for known in WHOLE)


def _in_bounds(name: str, value: object, low: float, high: float) -> float:
    try:
        return whole(name, value, int(low), int(high)) if WHOLE[name] else real(name, value, low, high)
    except BadValue as error:
        raise ConfigError(str(error)) from None
