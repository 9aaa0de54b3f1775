"""The live page and the metrics over HTTP, on this host only: loopback, a token, no other site's requests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tornado import httpserver, netutil, web

from flowengine.errors import FlowError
from flowengine.observe.gather import Gatherer
from flowengine.observe.metrics import families

LOOPBACK = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost", "::1", "[::1]")  # under which a browser of this host, or a tunnel, comes
TOKEN_CHARS = 40
IDLE_S = 60.0
CLOSE_S_MAX = 0.3
HEADER_BYTES_MAX = 16 << 10
FILES = {"/": ("index.html", "text/html; charset=utf-8"), "/page.css": ("page.css", "text/css; charset=utf-8"),
         "/page.js": ("page.js", "text/javascript; charset=utf-8"),
         "/draw.js": ("draw.js", "text/javascript; charset=utf-8")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFUSED = "403: the token is missing or wrong; `flow page` tells the whole address\n"
NOT_HERE = "403: this page is served under 127.0.0.1 and localhost only\n"


def token_of(secret: bytes) -> str:
    """The token of a cluster's page: the same in every life of its head, and nothing that tells the secret."""
    return hmac.new(secret, b"flowengine page", hashlib.sha256).hexdigest()[:TOKEN_CHARS]


class PageServer:
    """Serves on one port; token "": an open port, which has the metrics only."""

    def __init__(self, gatherer: Gatherer, token: str) -> None:
        self.gatherer = gatherer
        self.token = token
        self.port = 0
        self._server: httpserver.HTTPServer | None = None

    def open(self, port: int) -> None:
        """Listen on the loop that runs; 0: any port. Raises FlowError when the port cannot be had."""
        try:
            sockets = netutil.bind_sockets(port, LOOPBACK)
        except OSError as error:
            raise FlowError(f"port {port} cannot be had for the page: {error.strerror}") from error
        server = httpserver.HTTPServer(application(self.gatherer, self.token), idle_connection_timeout=IDLE_S,
                                       max_header_size=HEADER_BYTES_MAX, max_body_size=0)
        server.add_sockets(sockets)
        self.port, self._server = sockets[0].getsockname()[1], server

    @property
    def url(self) -> str:
        """The address for a browser of this host, with the token."""
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"

    async def close(self) -> None:
        """Stop listening and end what is open; an answer under way does not hold up the end of the head."""
        if self._server is not None:
            self._server.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S_MAX):
                    await self._server.close_all_connections()


def application(gatherer: Gatherer, token: str) -> web.Application:
    """The paths that there are."""
    shared = {"gatherer": gatherer, "token": token}
    paths: list[Any] = [("/metrics", Metrics, shared)]
    if token:
        paths += [("/api/now", Now, shared), ("/api/runs", Runs, shared), ("/api/story", Story, shared),
                  ("/api/objects", Objects, shared)]
        paths += [(path, PageFile, {**shared, "file": file, "kind": kind}) for path, (file, kind) in FILES.items()]
    return web.Application(paths, default_handler_class=Nothing, default_handler_args=shared, log_function=_quiet)


def _quiet(handler: web.RequestHandler) -> None:
    """Requests are not news for those who read the head's log."""


class Answer(web.RequestHandler):
    """What all answers have in common: who may ask, and what a browser may do with them."""

    SUPPORTED_METHODS = ("GET", "HEAD")

    def initialize(self, gatherer: Gatherer, token: str) -> None:
        """As tornado wants it in place of a constructor."""
        self.gatherer = gatherer
        self.token = token

    def set_default_headers(self) -> None:
        """Before anything else, and for errors too."""
        self.clear_header("Server")
        for name, value in HEADERS.items():
            self.set_header(name, value)

    def prepare(self) -> None:
        """Refuse names of other hosts, which a page elsewhere could have led here, and those without the token."""
        if self.request.host_name not in NAMES:
            self._refuse(NOT_HERE)
        elif self.token and not any(same(given, self.token) for given in self._given()):
            self._refuse(REFUSED)
        elif self.token and self.get_query_argument("token", ""):
            self.set_cookie(self._cookie(), self.token, httponly=True, samesite="Strict", path="/")

    def _given(self) -> Iterator[str]:
        yield self.get_query_argument("token", "")
        yield self.get_cookie(self._cookie()) or ""
        kind, _, given = self.request.headers.get("Authorization", "").partition(" ")
        yield given.strip() if kind.lower() == "bearer" else ""

    def _cookie(self) -> str:
        """Cookies do not tell ports apart, so the name does."""
        port = self.request.host.rpartition(":")[2]
        return f"flowengine_{port if port.isdecimal() else 80}"

    def _refuse(self, text: str) -> None:
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(text)

    def write_error(self, status_code: int, **options: Any) -> None:
        """A line of text: no traces for strangers."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{status_code}: {self._reason}\n")

    def log_exception(self, *what: Any) -> None:
        """Only what is a fault of ours: strangers cannot fill the log of the head."""
        if not isinstance(what[1], web.HTTPError):
            super().log_exception(*what)

    def json(self, blob: bytes) -> None:
        """Answer with what is encoded already."""
        self.set_header("Content-Type", "application/json")
        self.finish(blob)

    def head(self, *arguments: str) -> Any:
        """As GET; the body is left out by the server."""
        return self.get(*arguments)


class Nothing(Answer):
    """Any other path."""

    def get(self, *arguments: str) -> None:
        """It is not there."""
        raise web.HTTPError(404)


class PageFile(Answer):
    """A file of the page, which lies beside this one."""

    def initialize(self, gatherer: Gatherer, token: str, file: str = "", kind: str = "") -> None:
        """With the file and its type."""
        super().initialize(gatherer, token)
        self.file, self.kind = file, kind

    def get(self) -> None:
        """The file."""
        self.set_header("Content-Type", self.kind)
        self.finish((Path(__file__).parent / "page" / self.file).read_bytes())


class Now(Answer):
    """The newest document."""

    async def get(self) -> None:
        """As JSON."""
        self.json((await self.gatherer.latest()).blob)


class Runs(Answer):
    """The runs since a document."""

    def get(self) -> None:
        """As JSON: the number for the next time, the head's clock, and the runs."""
        since = self.get_query_argument("since", "0")
        number, found = self.gatherer.runs_after(int(since) if since.isdecimal() and len(since) < 16 else 0)
        now_ms = round(time.monotonic() * 1e3, 1)
        self.json(msgspec.json.encode({"number": number, "now_ms": now_ms, "runs": found}))


class Story(Answer):
    """What happened to something."""

    async def get(self) -> None:
        """As JSON: lines."""
        self.json(msgspec.json.encode({"lines": await self.gatherer.story(self.get_query_argument("id", ""))}))


class Objects(Answer):
    """What takes the memory."""

    async def get(self) -> None:
        """As JSON."""
        self.json(msgspec.json.encode(await self.gatherer.objects()))


class Metrics(Answer):
    """For Prometheus."""

    async def get(self) -> None:
        """In the text format."""
        from prometheus_client import CONTENT_TYPE_LATEST  # here: it takes as long to import as a page to be made

        page = (await self.gatherer.latest()).page
        self.set_header("Content-Type", CONTENT_TYPE_LATEST)
        self.finish(exposition(page))


def exposition(page: dict[str, Any]) -> bytes:
    """The metrics of a document in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    class Collector:
        def collect(self) -> Iterator[Metric]:
            for family in families(page):
                is_counter = family.kind == "counter"  # the library adds the ending of its name
                kind = CounterMetricFamily if is_counter else GaugeMetricFamily
                names = list(family.samples[0][0]) if family.samples else []
                name = family.name.removesuffix("_total") if is_counter else family.name
                metric = kind(name, family.text, labels=names)
                for labels, value in family.samples:
                    metric.add_metric(list(labels.values()), value)
                yield metric

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry)


def same(given: str, token: str) -> bool:
    """Whether it is the token, in a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())
