"""What the plugins for Dask decide and read, without a cluster."""
from __future__ import annotations

import os
import pickle
import subprocess
import sys

import msgspec
import pytest
from distributed import Security
from distributed.protocol.pickle import dumps

from flowengine.api import STORE_BYTES_MIN
from flowengine.config import Config
from flowengine.core.messages import NodeEntry
from flowengine.deploy.beside import is_busy
from flowengine.deploy.dask import HeadPlugin, check_version, host_of, is_tls, node_plugin
from flowengine.deploy.nodes import Share, launcher_settings
from flowengine.deploy.reports import Waiting, workers_wanted
from flowengine.deploy.seeds import NodeSeed, Seed, tls_from
from flowengine.errors import BadValue
from flowengine.interop.dask_graph import check_keywords, dask_get

SEED = Seed(session="s", secret=b"x" * 32, config=Config(), durable_url="", log_to_driver=True)
TOLD = NodeSeed(head="tcp://127.0.0.1:1#head-s", seed=SEED)
ONE_CPU = (("CPU", 1.0),)


@pytest.mark.parametrize(("mistyped", "meant"), [
    ("max_retry", "max_retries"), ("num_cpu", "num_cpus"), ("num_worker", "num_workers"), ("callback", "callbacks")])
def test_a_mistyped_keyword_is_refused(mistyped, meant):
    with pytest.raises(BadValue, match=f"did you mean '{meant}'"):
        dask_get({}, [], **{mistyped: 1})


def test_keywords_of_other_schedulers_are_ignored():
    check_keywords(["foo", "pool", "retries", "workers", "optimize_graph", "num_workers", "cache", "max_retries"])


@pytest.mark.parametrize(("waiting", "totals", "wanted"), [
    ([], [], 0),
    ([Waiting(ONE_CPU, 3, 0.0)], [], 3),                                   # nothing is known of the workers
    ([Waiting(ONE_CPU, 3, 0.0)], [{"CPU": 2.0}], 2),
    ([Waiting(ONE_CPU, 3, 0.0), Waiting((("CPU", 2.0),), 1, 0.0)], [{"CPU": 2.0}], 3),
    ([Waiting((("CPU", 4.0),), 3, 0.0)], [{"CPU": 2.0}], 0),               # more of these would not help
    ([Waiting((("FPGA", 1.0),), 3, 0.0)], [{"CPU": 2.0}], 0),
    ([Waiting(ONE_CPU, 100, 0.01)], [{"CPU": 1.0}], 1),                    # all of it is over soon
    ([Waiting(ONE_CPU, 100, 1.0)], [{"CPU": 1.0}], 20),
    ([Waiting(ONE_CPU, 2, 60.0)], [{"CPU": 1.0}], 2),
    ([Waiting((), 2, 0.0)], [{"CPU": 1.0}], 2),
])
def test_how_many_workers_would_serve_what_waits(waiting, totals, wanted):
    assert workers_wanted(waiting, totals, 5.0) == wanted


@pytest.mark.parametrize(("states", "queued", "busy"), [
    ((), 0, False), (("idle", "starting"), 0, False), (("idle", "leased"), 0, True), (("blocked",), 0, True),
    (("idle",), 1, True)])
def test_a_node_is_busy_while_somebody_has_a_worker(states, queued, busy):
    workers = tuple((f"w{number}", 1, state, "") for number, state in enumerate(states))
    assert is_busy(NodeEntry("n", "tcp://a:1#n", "a", ONE_CPU, ONE_CPU, workers, queued)) is busy


def a_share(folder, **changes):
    fields = {"host": "127.0.0.1", "threads": 2, "memory_bytes": 1 << 30, "local_directory": str(folder),
              "resources": {}, "tls": None, **changes}
    return Share(**fields)


def test_a_node_has_the_share_of_its_worker(tmp_path):
    settings = launcher_settings(a_share(tmp_path, resources={"disk": 3.0, "GPU": 1.0}), TOLD)
    assert dict(settings.total) == {"CPU": 2.0, "memory": float(1 << 30), "disk": 3.0, "GPU": 1.0}
    assert settings.num_workers == 2
    assert STORE_BYTES_MIN <= settings.store_limit_bytes <= Config().store_fraction * (1 << 30)
    assert settings.state_dir.startswith(str(tmp_path))
    assert os.path.isdir(settings.state_dir)
    assert settings.watch_parent
    assert settings.head == TOLD.head


def test_a_worker_without_a_limit_shares_memory_by_its_threads(tmp_path):
    few = dict(launcher_settings(a_share(tmp_path, threads=1, memory_bytes=0), TOLD).total)["memory"]
    assert 0 < few <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_folder_that_is_no_use_is_told(tmp_path):
    (tmp_path / "flowengine").write_text("a file")
    with pytest.raises(BadValue, match="cannot be used"):
        launcher_settings(a_share(tmp_path), TOLD)


def test_certificates_come_from_texts_and_files(tmp_path):
    made = Security.temporary()
    path = tmp_path / "key.pem"
    path.write_text(made.tls_worker_key)
    mixed = Security(require_encryption=True, tls_ca_file=made.tls_ca_file, tls_worker_cert=made.tls_worker_cert,
                     tls_worker_key=str(path))
    assert tls_from(mixed, "worker") == tls_from(made, "worker")
    assert tls_from(made, "worker").authority == made.tls_ca_file
    both = Security(require_encryption=True, tls_ca_file=made.tls_ca_file, tls_worker_cert=made.tls_worker_cert)
    assert tls_from(both, "worker").key == ""


def test_addresses():
    assert is_tls("tls://host:1")
    assert not is_tls("tcp://host:1")
    assert host_of("tcp://127.0.0.1:8786") == "127.0.0.1"
    assert host_of("tcp://[::1]:8786") == "::1"
    assert host_of("inproc://127.0.0.3/1/2") == "127.0.0.1"


def test_other_versions_are_refused():
    with pytest.raises(BadValue, match=r"flowengine 0\.0, the Dask worker has flowengine"):
        check_version("0.0", "the Dask worker")


def test_the_plugin_of_the_scheduler_travels():
    plugin = pickle.loads(dumps(HeadPlugin(SEED)))
    assert msgspec.json.decode(plugin.packed, type=Seed) == SEED
    assert plugin.idempotent


READ = """
import pickle, sys
sys.modules["flowengine"] = None
plugin = pickle.loads(sys.stdin.buffer.read())
told = []
class Worker:
    address = "tcp://w:1"
    def log_event(self, topic, msg): told.append((topic, msg))
plugin.setup(Worker())
assert told[0][0] == "flowengine-node", told
assert "is not installed there" in told[0][1]["reason"], told
"""


def test_the_plugin_of_the_workers_is_read_where_flowengine_is_missing_and_says_so():
    done = subprocess.run([sys.executable, "-c", READ], input=dumps(node_plugin(TOLD, "0.1.0")), capture_output=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr.decode()
