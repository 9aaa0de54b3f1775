"""What travels to a Dask cluster with the plugins, and what they tell; all of it plain."""

from __future__ import annotations

import msgspec

from flowengine.config import Config
from flowengine.runtime.settings import Tls

HEAD_NAME = "flowengine-head"  # of the scheduler's plugin
NODE_NAME = "flowengine-node"  # of the workers' plugin
NODE_TOPIC = "flowengine-node"  # workers tell the scheduler about their nodes
LEASE_TOPIC = "flowengine-lease"  # the scheduler tells programs which workers are in use
LEASE_KEY = "flowengine-lease-"  # how the keys of leases begin


class Seed(msgspec.Struct, frozen=True, kw_only=True):
    """What the first program says of the engine that it starts."""

    session: str
    secret: bytes
    config: Config
    durable_url: str  # of the storage for what must outlive processes; "": the default folder of each host
    log_to_driver: bool


class NodeSeed(msgspec.Struct, frozen=True, kw_only=True):
    """What a node beside a Dask worker is told besides the worker's share."""

    head: str
    seed: Seed


class Entered(msgspec.Struct, frozen=True, kw_only=True):
    """What a program gets that has joined: how to find the engine."""

    head: str
    session: str
    secret: bytes
    has_tls: bool


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A Dask worker and its node."""

    node_id: str = ""
    is_here: bool = False  # the head knows the node
    reason: str = ""  # why there is none


def tls_from(security: object, role: str) -> Tls:
    """What a process of that role in a Dask cluster shows and trusts."""
    certificate = text_of(getattr(security, f"tls_{role}_cert"))
    return Tls(certificate=certificate, key=text_of(getattr(security, f"tls_{role}_key")),
               authority=text_of(getattr(security, "tls_ca_file", "")))


def text_of(pem: str | None) -> str:
    """PEM as text, which may be given by the path of its file."""
    if not pem or "\n" in pem:
        return pem or ""
    with open(pem, encoding="ascii") as file:
        return file.read()
