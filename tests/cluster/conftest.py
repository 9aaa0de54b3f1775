"""Fixtures of the tests that need two hosts: one cluster a module, one program a test; or a cluster of a test's own."""
from __future__ import annotations

import pytest

import flowengine as flow
from tests.cluster.host_kit import Cluster, wait_for


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.end()
    assert cluster.left() == []


@pytest.fixture
def cluster(shared):
    with flow.init(address=shared.file):
        wait_for(lambda: len(flow.nodes()) == 2)
        yield shared


@pytest.fixture
def own(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()
