"""`coder serve`: the agent over HTTP, for clients of opencode's API, curl, and a page.

Read this first: who may ask for what. The rest: serve_sessions.py (what runs, what is shown),
serve_routes.py, serve_opencode.py and serve_questions.py (the form of opencode's API),
serve_openapi.py, serve_page.html.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from operator import attrgetter
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coder.doors.serve_openapi import openapi
from coder.doors.serve_peers import is_own
from coder.doors.serve_routes import ROUTES
from coder.doors.serve_sessions import Sessions
from coder.sessions.store import Store
from coder.types import CoderError

PAGE = Path(__file__).with_name("serve_page.html").read_text()
SCRIPT = re.findall(r"(?s)<script>(.*?)</script>", PAGE)[0]
SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; script-src 'sha256-{SCRIPT_HASH}'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
ANY = ("0.0.0.0", "[::]")  # of a machine whose names are not known here


def problem(status: int, text: str) -> JSONResponse:
    """An error in the form of opencode's API."""
    body = {
        "name": HTTPStatus(status).phrase,
        "data": {"message": text},
    }
    return JSONResponse(body, status)


class Guard:
    """Lets in who has the token. The page alone is for everybody: it holds nothing.

    The page of another origin is not let in, whatever it knows; and a name that leads to this
    machine has to be one of `hosts` (a page could rebind its own).
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Sequence[str]) -> None:
        self.app = app
        self.hosts = hosts
        self.expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self.refusal(headers, scope["path"])
        if refusal is None and scope["path"] != "/" and is_own(scope["client"]):
            refusal = problem(403, "commands of a session may not ask")
        answer = refusal or self.app
        await answer(scope, receive, send)

    def refusal(self, headers: Headers, path: str) -> Response | None:
        host = headers.get("host", "")
        name = re.sub(r":\d*$", "", host)
        if self.hosts and name.lower() not in self.hosts:
            return problem(400, f"this server is not called {name!r}")
        allowed: list[list[str]] = [[], [f"http://{host}"], [f"https://{host}"]]
        if headers.getlist("origin") not in allowed:  # two are none of a browser
            return problem(403, "pages of another origin may not ask")
        if path == "/":
            return None
        given = headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), self.expected):
            return problem(401, "the token is wrong or missing: Authorization: Bearer TOKEN")
        return None


# ---- the application -----------------------------------------------------------------------------


async def page(request: Request) -> Response:
    """The page for a browser."""
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": POLICY})


async def describe(request: Request) -> Response:
    """This API, as OpenAPI."""
    return JSONResponse(openapi())


async def explain(request: Request, error: Exception) -> Response:
    """The answer to a request that cannot be met."""
    return problem(400, str(error))


async def explain_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, error.detail)


def application(sessions: Sessions, token: str, hosts: Sequence[str]) -> ASGIApp:
    """`hosts`: the names in a Host header; none: all."""
    own = [
        Route("/", page),
        Route("/doc", describe),
    ]
    app = Starlette(
        routes=own + ROUTES,
        exception_handlers={
            HTTPException: explain_http,
            CoderError: explain,
        },
    )
    app.state.sessions = sessions
    return Guard(app, token, hosts)


# ---- the server ----------------------------------------------------------------------------------


MOST_SILENT = 32  # connections without a request so far: they could take all file numbers


class Connection(H11Protocol):
    """Makes room for itself: the oldest silent one ends if there are too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        own = [other for other in self.connections if isinstance(other, Connection)]
        silent = [other for other in own if other.cycle is None]
        if len(silent) > MOST_SILENT:
            oldest = min(silent, key=attrgetter("since"))
            self.connections.discard(oldest)
            oldest.transport.abort()


class Server(uvicorn.Server):
    """Closes the sessions when it is told to end: streams would never end by themselves."""

    def __init__(
        self,
        config: uvicorn.Config,
        sessions: Sessions,
        ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.sessions = sessions
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.sessions.close()
        await super().shutdown(sockets)


def serve(
    store: Store,
    listener: socket.socket,
    host: str,
    token: str,
    ready: Callable[[], None],
) -> None:
    """Serve until a signal ends it; `ready` is called once it serves."""
    sessions = Sessions(store)
    hosts: list[str] = []
    if host not in ANY:
        hosts = [*LOOPBACK, host.lower()]
    config = uvicorn.Config(
        application(sessions, token, hosts),
        access_log=False,
        log_config=None,
        log_level="error",  # a warning is about what a stranger has sent
        http=Connection,
        ws="none",
        backlog=16,  # are accepted at once; each logs a traceback if there is no file number
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    Server(config, sessions, ready).run([listener])
