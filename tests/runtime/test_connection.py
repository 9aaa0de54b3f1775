"""The connection file, the identity of a head over its restarts, and TLS from one certificate."""
from __future__ import annotations

import asyncio
import json
import os

import pytest

from flowengine.config import Config
from flowengine.core.messages import Ping
from flowengine.errors import BadValue, UsageError
from flowengine.runtime import process
from flowengine.runtime.connection import (
    Connection,
    head_settings,
    new_secret,
    new_session,
    new_tls,
    port_of,
    read_connection,
    write_connection,
)
from flowengine.runtime.settings import Tls

from .kit import run

ADDRESS = "tcp://127.0.0.1:4321#head-abc"


@pytest.fixture(scope="module")
def tls():
    return new_tls()


def a_connection(tls: Tls | None = None) -> Connection:
    return Connection(address=ADDRESS, secret=new_secret().hex(), session=new_session(),
                      certificate=tls.certificate if tls else None, key=tls.key if tls else None)


@pytest.mark.parametrize("secure", [False, True])
def test_there_and_back(tmp_path, tls, secure):
    path = tmp_path / "new" / "cluster.json"
    written = a_connection(tls if secure else None)
    write_connection(path, written)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["cluster.json"]
    read = read_connection(path)
    assert read == written
    assert read.tls == (tls if secure else None)
    assert len(read.secret_bytes) == 32
    assert port_of(read.address) == 4321


def test_a_file_that_was_open_to_all_is_closed_when_it_is_written_again(tmp_path):
    path = tmp_path / "cluster.json"
    path.touch(mode=0o666)
    path.chmod(0o666)
    write_connection(path, a_connection())
    assert os.stat(path).st_mode & 0o777 == 0o600


def changed(**fields):
    content = json.loads(json.dumps({"address": ADDRESS, "secret": "00" * 32, "session": "s", "version": 1}))
    return json.dumps({**content, **fields})


@pytest.mark.parametrize(("content", "text"), [
    ("", "not a connection file"),
    ("{", "not a connection file"),
    ("[]", "not a connection file"),
    (changed(secret="zz"), "not a connection file"),
    (changed(secret=""), "secret"),
    (changed(version=9), "version 9"),
    (changed(address="somewhere"), "address"),
    (changed(certificate="x"), "without its key"),
])
def test_says_what_is_wrong(tmp_path, content, text):
    path = tmp_path / "cluster.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(BadValue, match=text) as refused:
        read_connection(path)
    assert "cluster.json" in str(refused.value)
    assert isinstance(refused.value, UsageError)


def test_a_missing_folder_or_open_file_is_refused(tmp_path):
    with pytest.raises(BadValue, match="no connection file"):
        read_connection(tmp_path / "none.json")
    with pytest.raises(BadValue, match="cannot be read"):
        read_connection(tmp_path)
    path = tmp_path / "cluster.json"
    path.write_text(changed())
    path.chmod(0o644)
    with pytest.raises(BadValue, match="chmod 600"):
        read_connection(path)


def test_a_head_that_starts_again_is_the_same_head(tmp_path):
    state = str(tmp_path / "state")
    first = head_settings("127.0.0.1", str(tmp_path / "cluster.json"), state, tls=False)
    assert first.port == 0
    told = Connection(address=ADDRESS, secret=first.secret.hex(), session=first.session)
    for path in first.connection_paths:
        write_connection(path, told)
    again = head_settings("127.0.0.1", str(tmp_path / "cluster.json"), state, tls=False)
    assert (again.secret, again.session, again.port, again.tls) == (first.secret, first.session, 4321, None)
    other = head_settings("127.0.0.1", str(tmp_path / "cluster.json"), str(tmp_path / "other"), tls=False)
    assert other.secret != first.secret


def test_one_certificate_serves_both_sides_and_no_other_gets_in(tls):
    async def scenario():
        arrived = asyncio.Queue()
        config = Config()

        async def endpoint(shown):
            place = process.Place(host="127.0.0.1", secret=b"s" * 32, tls=shown, config=config)
            made = process.new_endpoint(place, lambda peer, messages: arrived.put_nowait((peer, messages)),
                                        lambda peer, reason: arrived.put_nowait((peer, reason)))
            await made.start()
            return made

        a, b, stranger = await endpoint(tls), await endpoint(tls), await endpoint(new_tls())
        b.send(a.address, Ping(1), True)
        assert await arrived.get() == (b.address, [Ping(1)])
        stranger.send(a.address, Ping(2), True)
        lost, reason = await arrived.get()
        assert lost == a.address
        assert "TLS" in reason
        await asyncio.gather(a.close(), b.close(), stranger.close())

    run(scenario)
