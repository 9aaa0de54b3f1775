"""The live page of a real engine: who may read it, what it tells, and how it looks in a browser."""

from __future__ import annotations

import http.client
import json
import os
import pathlib
import re
import signal
import socket
import stat
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest

import flowengine as flow
from flowengine import cli
from flowengine.observe.screens import tunnel
from flowengine.runtime.connection import page_path
from tests.cluster.browser import browser, found
from tests.cluster.host_kit import Flow
from tests.cluster.kit import two_workers, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
PHONE, DESK = (390, 844), (1280, 900)


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module", autouse=True)
def engine(state_dir):
    yield from two_workers(state_dir=state_dir)


@flow.remote
def plain(value):
    return value


@flow.remote(max_retries=0)
def fails(text):
    raise ValueError(text)


@flow.remote
def waits(name):
    while not pathlib.Path(name).exists():
        flow.get(plain.remote(1))


@flow.remote
class Account:
    def __init__(self) -> None:
        self.amount = 0

    def add(self, amount: int) -> int:
        self.amount += amount
        return self.amount


def fetch(url: str, **headers: str) -> tuple[int, str, Any]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


def parts() -> tuple[str, str]:
    """The address without its token, and the token."""
    base, token = flow.page_url().split("/?token=")
    return base, token


def now() -> dict[str, Any]:
    base, token = parts()
    return json.loads(fetch(f"{base}/api/now?token={token}")[1])


def shown(check) -> dict[str, Any]:
    """The first document that shows what is looked for."""
    last: list[dict[str, Any]] = []

    def look() -> object:
        last[:] = [now()]
        return check(last[0])

    until(look)
    return last[0]


# --- who may read it ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [
    "/", "/page.js", "/page.css", "/draw.js", "/api/now", "/api/runs", "/api/objects", "/api/story?id=x", "/metrics",
    "/other"])
def test_nothing_is_told_without_the_token(path):
    base, token = parts()
    join = "&" if "?" in path else "?"
    for bad in (path, f"{path}{join}token=", f"{path}{join}token={token[:-1]}", f"{path}{join}token={token}x",
                f"{path}{join}token=%C3%A4"):
        status, text, headers = fetch(base + bad)
        assert (status, token in text) == (403, False)
        assert "flowengine" not in text.lower().replace("`flow page`", "")
        assert "Set-Cookie" not in headers


@pytest.mark.parametrize("way", ["query", "header", "cookie"])
def test_the_token_is_taken(way):
    base, token = parts()
    port = base.rpartition(":")[2]
    given = {"header": {"Authorization": f"Bearer {token}"}, "cookie": {"Cookie": f"flowengine_{port}={token}"},
             "query": {}}[way]
    status, text, _ = fetch(f"{base}/api/now" + (f"?token={token}" if way == "query" else ""), **given)
    assert status == 200
    assert json.loads(text)["totals"]["nodes"] == 1


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.1.2.3", "localhost.evil"])
def test_names_of_other_hosts_are_refused_even_with_the_token(host):
    base, token = parts()
    assert fetch(f"{base}/api/now?token={token}", Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1:9", "localhost"])
def test_a_tunnel_may_have_another_port(host):
    base, token = parts()
    assert fetch(f"{base}/?token={token}", Host=host)[0] == 200


def test_a_browser_is_told_to_keep_it_for_itself():
    base, token = parts()
    _, text, headers = fetch(f"{base}/?token={token}", Origin="http://evil.example")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "Access-Control-Allow-Origin" not in headers
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    assert (headers["X-Frame-Options"], headers["Cache-Control"]) == ("DENY", "no-store")
    assert re.findall(r'(?:src|href)="(?!page|data:,|#)', text) == []  # nothing from elsewhere


def test_only_reading_is_possible():
    base, token = parts()
    request = urllib.request.Request(f"{base}/api/now?token={token}", method="POST", data=b"")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    with refused.value:
        assert refused.value.code == 405


def test_the_page_listens_on_this_host_only():
    base, _ = parts()
    port = int(base.rpartition(":")[2])
    table = pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    assert [place for place in listening if place.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_the_file_with_the_address_is_private_and_goes_with_the_engine(engine, state_dir):
    path = page_path(str(state_dir), engine.session_id)
    assert json.loads(path.read_text())["url"] == engine.page_url == flow.page_url()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- what it tells --------------------------------------------------------------------------------


def test_tasks_failures_actors_and_objects_are_told():
    account = Account.options(name="bank").remote()
    flow.get([account.add.remote(1) for _ in range(20)])
    held = flow.put(np.zeros(1 << 20))
    flow.get([plain.remote(1) for _ in range(50)])
    with pytest.raises(ValueError, match="no such thing"):
        flow.get(fails.remote("no such thing"))
    page = shown(lambda page: any(row["name"] == "plain" and row["runs"] >= 50 for row in page["functions"])
                 and page["failures"] and page["totals"]["actors"].get("alive") and page["actors"][0]["calls"] >= 20
                 and page["totals"]["store"]["used_bytes"] >= 8 << 20)
    (actor,) = [one for one in page["actors"] if one["named"] == "bank"]
    assert actor["node_id"] == page["nodes"][0]["node_id"]
    assert actor["worker"] in [worker["worker_id"] for worker in page["nodes"][0]["workers"]]
    failure = page["failures"][0]
    assert (failure["name"], failure["text"]) == ("fails", "ValueError: no such thing")
    base, token = parts()
    story = json.loads(fetch(f"{base}/api/story?id={failure['id']}&token={token}")[1])["lines"]
    assert any("submitted" in line and "fails" in line for line in story)
    assert any("failed after" in line for line in story)
    del held
    flow.kill(account)


def test_what_runs_and_what_waits_is_told(tmp_path):
    refs = [waits.remote(str(tmp_path / "go")) for _ in range(4)]
    impossible = plain.options(num_cpus=64).remote(1)
    page = shown(lambda page: any(worker["name"] in ("waits", "plain") for worker in page["nodes"][0]["workers"])
                 and any(queue["shape"] == {"CPU": 64.0} and "64" in queue["reason"] for queue in page["queues"]))
    assert page["totals"]["tasks"]["sent"] >= 1
    flow.cancel(impossible)
    (tmp_path / "go").touch()
    flow.get(refs, timeout=30)


def test_a_worker_that_died_is_told():
    @flow.remote
    def dies():
        if flow.context().attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    flow.get(dies.remote(), timeout=60)
    page = shown(lambda page: any(one["kind"] == "worker" for one in page["failures"])
                 and page["totals"]["counters"]["tasks_retried"])
    assert "SIGKILL" in next(one["text"] for one in page["failures"] if one["kind"] == "worker")


def test_members_that_are_missed_in_a_collective_are_told():
    @flow.remote(num_cpus=0)
    class Member:
        def __init__(self, rank: int) -> None:
            self.group = flow.collectives.join("pair", 2, rank)

        def add(self) -> float:
            return float(self.group.allreduce(np.ones(4))[0])

    members = [Member.remote(rank) for rank in range(2)]
    first = members[0].add.remote()
    page = shown(lambda page: any(group["steps"] and group["formed"] for group in page["groups"]))
    (group,) = page["groups"]
    assert [(seat["rank"], seat["state"]) for seat in group["seats"]] == [(0, "here"), (1, "here")]
    assert "waits for rank 1" in group["steps"][0]["text"]
    assert flow.get([first, members[1].add.remote()], timeout=30) == [2.0, 2.0]
    for member in members:
        flow.kill(member)


def test_runs_come_once_to_each_viewer():
    flow.get([plain.remote(1) for _ in range(30)])
    base, token = parts()
    shown(lambda page: any(row["runs"] for row in page["functions"]))
    told = json.loads(fetch(f"{base}/api/runs?since=0&token={token}")[1])
    assert any(run[2] == "plain" for run in told["runs"])
    again = json.loads(fetch(f"{base}/api/runs?since={told['number']}&token={token}")[1])
    assert again["runs"] == []
    assert fetch(f"{base}/api/runs?since=nonsense&token={token}")[0] == 200


def test_metrics_are_the_counters():
    flow.get([plain.remote(1) for _ in range(5)])
    base, token = parts()
    submitted = flow.stats()["tasks_submitted"]
    text = ""

    def told() -> bool:
        nonlocal text
        text = fetch(f"{base}/metrics", Authorization=f"Bearer {token}")[1]
        value = re.search(r"^flowengine_tasks_submitted_total (\S+)$", text, re.MULTILINE)
        return value is not None and float(value[1]) >= submitted

    until(told)
    assert 'flowengine_workers{host="127.0.0.1"' in text or 'flowengine_workers{node="' in text
    assert "# TYPE flowengine_tasks gauge" in text


def test_the_command_line_tells_where_it_is(state_dir, capsys, monkeypatch):
    here = ["--state-dir", str(state_dir)]
    assert cli.main(["page", *here]) == 0
    assert capsys.readouterr() == (f"{flow.page_url()}\n", "")
    assert cli.main(["status", *here]) == 0
    assert f"page {flow.page_url()}" in capsys.readouterr().out
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: not opened.append(url))
    assert cli.main(["page", "--open", *here]) == 0
    file = pathlib.Path(opened[0].removeprefix("file://"))
    assert parts()[1] not in opened[0]  # others may see what is started
    assert flow.page_url() in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_timeline_has_arrows_from_programs_and_from_workers(state_dir, tmp_path):
    @flow.remote
    def outer():
        return flow.get(plain.options(name="inner").remote(1))

    flow.get(outer.remote(), timeout=30)
    out = tmp_path / "out.json"
    assert cli.main(["timeline", str(out), "--state-dir", str(state_dir)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    threads = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    submits = {one["name"]: threads[one["pid"], one["tid"]] for one in events if one.get("cat") == "submit"}
    assert submits["submit outer"] == f"program {os.getpid()}"
    assert submits["submit inner"].startswith("worker ")
    assert flow.timeline(tmp_path / "own.json") >= 1


@flow.remote
def calls(account):
    return flow.get(account.add.remote(2))


def test_the_timeline_has_calls_their_callers_and_what_was_done_again(tmp_path):
    account = Account.options(checkpoint="never").remote()
    assert flow.get([account.add.remote(1) for _ in range(3)], timeout=30) == [1, 2, 3]
    assert flow.get(calls.remote(account), timeout=30) == 5
    flow.chaos.kill_worker(of=account)
    assert flow.get(account.add.remote(1), timeout=30) == 6
    flow.timeline(tmp_path / "own.json")
    events = json.loads((tmp_path / "own.json").read_text())["traceEvents"]
    ran = [(one["name"], one["args"]["life"]) for one in events if one.get("cat", "").startswith(("call", "actor"))]
    assert sorted(ran) == [
        ("Account.__init__", 1), ("Account.__init__ (restart)", 2), *[("Account.add", 1)] * 3,
        *[("Account.add (replay)", 2)] * 3, ("Account.add", 2)] or ran


def test_a_page_of_another_host_comes_with_the_way_there():
    assert tunnel("tls://10.0.0.7:4321#head", "http://127.0.0.1:8080/?token=x") \
        == "ssh -N -L 8080:127.0.0.1:8080 10.0.0.7"


def test_a_story_of_nothing_is_empty():
    base, token = parts()
    for name in ("", "x", "f" * 32, "%00" * 9, "a" * 1_000):
        assert json.loads(fetch(f"{base}/api/story?id={name}&token={token}")[1]) == {"lines": []}
    assert fetch(f"{base}/api/story?id=%ff&token={token}")[:2] == (400, "400: Bad Request\n")


# --- a head of its own ----------------------------------------------------------------------------


def test_a_head_that_is_started_again_has_its_page_where_it_was(tmp_path):
    page_port, metrics_port = free_port(), free_port()
    options = ("head", "--connection-file", tmp_path / "c.json", "--state-dir", tmp_path, "--page-port", page_port,
               "--metrics-port", metrics_port)
    urls = []
    for _ in range(2):
        head = Flow(*options)
        head.says("page of session .* is served")
        until(lambda: fetchable(f"http://127.0.0.1:{metrics_port}/metrics"))
        assert fetch(f"http://127.0.0.1:{metrics_port}/")[0] == 404
        (path,) = tmp_path.glob("page-*.json")
        urls.append(json.loads(path.read_text())["url"])
        assert fetch(urls[-1])[0] == 200
        assert head.end() == 0
    assert urls[0] == urls[1]
    assert urls[0].startswith(f"http://127.0.0.1:{page_port}/")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def fetchable(url: str) -> bool:
    try:
        return fetch(url)[0] == 200
    except urllib.error.URLError:
        return False


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab():
    path = found()
    if path is None:
        pytest.skip("there is no Chromium on this host")
    with browser(path) as opened:
        opened.screen(*DESK)
        opened.go(flow.page_url())
        opened.until("document.querySelector('#status')?.className === 'live'")
        yield opened
        assert opened.said == []  # no errors, nothing refused by the page's own policy


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [PHONE, DESK])
def test_it_fits_the_screen(tab, size, dark):
    tab.screen(*size, dark=dark, phone=size == PHONE)
    tab.until("document.querySelectorAll('#node-list table tbody tr').length >= 2")
    assert tab.value("document.documentElement.scrollWidth") == size[0]
    colour = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    assert (tab.value(colour) < 128) is dark
    tab.screen(*DESK)


def test_the_token_is_not_in_the_address_bar_and_a_reload_works(tab):
    tab.until("!location.href.includes('token')")
    tab.order("Page.reload")
    tab.until("document.querySelector('#status')?.className === 'live'")
    assert tab.value("document.cookie") == ""  # no script can read it


def test_texts_of_users_stay_texts(tab):
    with pytest.raises(ValueError, match="bold"):
        flow.get(fails.options(name="<img src=x onerror=alert(1)>").remote("<b>bold</b>"))
    tab.until("document.querySelector('#failure-table').textContent.includes('<b>bold</b>')")
    assert tab.value("document.querySelectorAll('#failure-table b, main img').length") == 0


def test_a_click_on_a_failure_tells_its_story(tab):
    tab.value("document.querySelector('#failure-table button.id').click()")
    tab.until("document.querySelector('#story').open"
              " && document.querySelector('#story-lines').textContent.includes('submitted')")
    tab.value("document.querySelector('#story form button').click()")
    tab.until("!document.querySelector('#story').open")


def test_the_largest_objects_are_listed_when_they_are_asked_for(tab):
    held = flow.put(np.zeros(3 << 20))
    tab.value("document.querySelector('#largest').open = true")
    tab.until("document.querySelector('#object-table').textContent.includes('24 MiB')")
    row = tab.value("document.querySelector('#object-table tbody tr').textContent")
    assert "put()" in row
    assert "1 reference" in row
    tab.value("document.querySelector('#largest').open = false")
    del held


def test_the_numbers_move_and_runs_are_drawn(tab):
    before = tab.value("document.querySelector('.tile b + span').textContent")
    flow.get([plain.remote(1) for _ in range(40)])
    tab.until(f"document.querySelector('.tile b + span').textContent !== {json.dumps(before)}")
    tab.until("[...document.querySelectorAll('#legend li')].some((item) => item.textContent === 'plain')")
    tab.until("(() => { const c = document.querySelector('#runs'); const all = c.getContext('2d')"
              ".getImageData(0, 0, c.width, c.height).data; return all.some((part) => part); })()")


def test_what_runs_at_once_in_a_worker_is_drawn_in_rows_of_its_own(tab):
    """Two calls at once, one behind them, and one that came to be known late though it began first."""
    script = """(async () => {
        const { Timeline } = await import("./draw.js");
        const made = new Timeline(...["canvas", "p", "ul"].map((name) => document.createElement(name)));
        const run = (at, long, worker = "w1") => [at, long, "C.m", "n", worker, "done", "t", 1];
        made.add([run(500, 400), run(0, 400), run(100, 100), run(600, 50, "w2")]);
        made.add([run(50, 1000)]);
        made.turn([], 1000);
        return [made.rows, made.runs.map((one) => [one.at, one.lane])];
    })()"""
    rows, runs = tab.value(script)
    assert rows == [["w1", 0], ["w1", 1], ["w1", 2], ["w2", 0]]
    assert runs == [[0, 0], [100, 1], [500, 0], [600, 0], [50, 2]]


def test_everything_has_a_name_for_those_who_do_not_see_it(tab):
    unnamed = tab.value(
        "[...document.querySelectorAll('button, canvas, table, section, nav, dialog, a')].filter((one) =>"
        " !(one.textContent.trim() || one.getAttribute('aria-label') || one.getAttribute('aria-labelledby')"
        " || one.caption)).map((one) => one.outerHTML.slice(0, 200))")
    assert unnamed == []
    assert tab.value("document.documentElement.lang") == "en"


def test_it_says_when_the_head_is_gone_and_comes_back(tab, tmp_path):
    options = ("head", "--connection-file", tmp_path / "c.json", "--state-dir", tmp_path, "--page-port", free_port())
    head = Flow(*options)
    head.says("page of session .* is served")
    tab.go(json.loads(next(tmp_path.glob("page-*.json")).read_text())["url"])
    tab.until("document.querySelector('#status')?.className === 'live'")
    head.end(signal.SIGKILL)
    tab.until("document.querySelector('#status').className === 'gone'")
    assert "Trying again" in tab.value("document.querySelector('#status').textContent")
    head = Flow(*options)
    head.says("page of session .* is served")
    tab.until("document.querySelector('#status').className === 'live'")
    assert head.end() == 0
    tab.said[:] = [said for said in tab.said if "ERR_" not in said]  # requests that found nobody


def test_a_page_that_is_open_outlives_the_head_of_an_engine():
    base, token = parts()
    first = now()["head"]["pid"]
    flow.chaos.kill_head()

    def is_whole_again() -> bool:
        try:
            page = json.loads(fetch(f"{base}/api/now?token={token}")[1])
        except (OSError, http.client.HTTPException):
            return False  # it is being started again
        return page["head"]["pid"] != first and page["totals"]["nodes"] == 1

    until(is_whole_again)
    assert parts() == (base, token)
