"""The file by which programs and nodes find a cluster and prove that they may use it; and the identity of a head."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from pathlib import Path

import msgspec

from flowengine.config import Config
from flowengine.errors import BadValue, FlowError, HeadLost
from flowengine.runtime.settings import HeadProcessSettings, Tls

VERSION = 1
SECRET_BYTES = 32
SESSION_BYTES = 6
LISTENS_TIMEOUT_S = 1.0


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds; secret is hex, certificate and key are PEM or null (no TLS)."""

    address: str
    secret: str
    session: str
    certificate: str | None = None
    key: str | None = None
    authority: str = ""
    version: int = VERSION

    @property
    def secret_bytes(self) -> bytes:
        """The secret as an endpoint wants it."""
        return bytes.fromhex(self.secret)

    @property
    def tls(self) -> Tls | None:
        """The certificate as an endpoint wants it."""
        if not self.certificate or self.key is None:
            return None
        return Tls(certificate=self.certificate, key=self.key, authority=self.authority)


def write_connection(path: str | os.PathLike[str], connection: Connection) -> None:
    """Write the file so that nobody else can read it and nobody ever sees a part of it."""
    write_private(path, msgspec.json.format(msgspec.json.encode(connection), indent=2) + b"\n")


def write_private(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file of mode 0600 as a whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(content)
    os.replace(draft, target)


def read_connection(path: str | os.PathLike[str]) -> Connection:
    """The cluster that a file leads to; raises BadValue that says what is wrong with the file."""
    try:
        with open(path, "rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read()
    except FileNotFoundError as error:
        raise BadValue(f"there is no connection file {path}: `flow head --connection-file {path}` writes it") from error
    except OSError as error:
        raise BadValue(f"the connection file {path} cannot be read: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise BadValue(f"the connection file {path} holds the secret of the cluster, and others may read or change it "
                       f"(mode {stat.S_IMODE(mode):04o}): chmod 600 it")
    try:
        connection = msgspec.json.decode(content, type=Connection)
        secret = connection.secret_bytes
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadValue(f"{path} is not a connection file: {error}") from error
    if connection.version != VERSION:
        raise BadValue(f"{path} is of version {connection.version}, this program reads version {VERSION}")
    if not secret:
        raise BadValue(f"the secret in {path} is empty")
    if "://" not in connection.address or "#" not in connection.address:
        raise BadValue(f"{path} has no address of a head: {connection.address!r}, expected tcp://HOST:PORT#NAME")
    if bool(connection.certificate) != bool(connection.key):
        raise BadValue(f"{path} has a certificate without its key, or a key without its certificate")
    return connection


def own_host(address: str) -> str:
    """The address of this host from which the head is reached."""
    host, _, port = address.partition("://")[2].partition("#")[0].rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.strip("[]"), int(port)))
        except OSError as error:
            raise HeadLost(f"the head at {host}:{port} cannot be reached from this host: {error}") from error
        return str(probe.getsockname()[0])


def session_path(state_dir: str, session: str) -> Path:
    """Where a local engine leaves its connection file while it runs."""
    return Path(state_dir, "sessions", f"{session}.json")


def page_path(state_dir: str, session: str) -> Path:
    """Where a head notes the address of its page while it serves one, and finds its port after a restart."""
    return Path(state_dir, f"page-{session}.json")


def local_sessions(state_dir: str) -> list[Connection]:
    """The local engines of this user that have left a connection file and accept connections, newest first."""
    found: list[tuple[float, Connection]] = []
    for path in Path(state_dir, "sessions").glob("*.json"):
        try:
            status = path.stat()
            if status.st_uid == os.getuid() and listens((connection := read_connection(path)).address):
                found.append((status.st_mtime, connection))
        except (OSError, FlowError):
            continue  # it ends just now, or is somebody else's
    return [connection for _, connection in sorted(found, key=lambda pair: -pair[0])]


def listens(address: str) -> bool:
    """Whether anybody accepts connections at tcp://HOST:PORT#NAME of this host."""
    host, _, port = address.partition("://")[2].partition("#")[0].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LISTENS_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def port_of(address: str) -> int:
    """The port in tcp://HOST:PORT#NAME, 0 when there is no address."""
    return int(address.partition("#")[0].rpartition(":")[2]) if address else 0


def new_secret() -> bytes:
    """A secret for a new cluster."""
    return secrets.token_bytes(SECRET_BYTES)


def new_session() -> str:
    """A name for a new session."""
    return secrets.token_hex(SESSION_BYTES)


def head_settings(host: str, connection_path: str, state_dir: str, tls: bool = True,
                  config: Config | None = None, port: int = 0) -> HeadProcessSettings:
    """What `flow head` runs with: the cluster of its state folder when there is one (a restart), else a new one."""
    identity_path = Path(state_dir, "head.json")
    known = read_connection(identity_path) if identity_path.exists() else None
    if known is None or (known.tls is not None) != tls:
        pair = new_tls() if tls else None
        known = Connection(address="tcp://new:0#new", secret=new_secret().hex(), session=new_session(),
                           certificate=pair.certificate if pair else None, key=pair.key if pair else None)
    return HeadProcessSettings(host=host, session=known.session, secret=known.secret_bytes, tls=known.tls,
                               state_dir=state_dir, config=config or Config(), port=port or port_of(known.address),
                               connection_paths=(str(identity_path), connection_path))


def new_tls() -> Tls:
    """A certificate for a new cluster."""
    from flowengine.runtime.link import new_certificate  # here, so that reading a file does not import Dask

    certificate, key = new_certificate()
    return Tls(certificate=certificate, key=key)
