"""The page on a local port, following runs: read-only, and nobody else's.

There are two addresses and no files behind them: ``/`` is the page, ``/data`` says what
the runs look like now. A request is refused unless its Host header is one this server
answers to, which keeps other sites from reaching it by a name of their own that they
point here (DNS rebinding), and unless it brings the token, where there is one.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tornado import httpserver, web

from meka.lab.cockpit.follow import Run
from meka.lab.cockpit.page import POLICY, page
from meka.lab.cockpit.view import RunView, state

PORT = 6352  # "meka" on a telephone
LOOPBACK = "127.0.0.1"
_EVERY = 1.0  # seconds between two looks at the runs
_TRIES = 20  # ports to try when the usual one is taken
_TOKEN = 16  # the fewest characters of a token


class WatchError(RuntimeError):
    """The page cannot be served as asked; the message says what to do."""


class Watched:
    """Runs that are followed, each with a version that grows with its news."""

    def __init__(self, paths: Sequence[Path]):
        """Follow these folders, whether or not they are there yet."""
        self._views = [RunView(Run(path)) for path in paths]
        self._states = [""] * len(paths)
        self._known: list[tuple[int, dict[str, Any]]] = [(-1, {})] * len(paths)
        self.versions = [0] * len(paths)

    def poll(self) -> None:
        """Look for news."""
        for k, view in enumerate(self._views):
            news = view.run.poll()
            now = state(view.run)
            if news or now != self._states[k]:
                self.versions[k] += 1
            self._states[k] = now

    def since(self, known: Sequence[int]) -> dict[str, Any]:
        """What is new to someone who knows these versions."""
        fresh = {
            str(k): self._view(k)
            for k, version in enumerate(self.versions)
            if k >= len(known) or known[k] != version
        }
        return {"versions": self.versions, "runs": fresh}

    def _view(self, k: int) -> dict[str, Any]:
        if self._known[k][0] != self.versions[k]:
            self._known[k] = (self.versions[k], self._views[k].to_json())
        return self._known[k][1]


class _Handler(web.RequestHandler):
    """Checks who asks before anything else; answers GET and HEAD only."""

    SUPPORTED_METHODS = ("GET", "HEAD")

    def initialize(self, watched: Watched, hosts: Callable[[str], bool], token: str):
        self.watched, self._hosts, self._token = watched, hosts, token

    def set_default_headers(self) -> None:
        self.clear_header("Server")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("X-Frame-Options", "DENY")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cross-Origin-Resource-Policy", "same-origin")

    def prepare(self) -> None:
        if not self._hosts(self.request.headers.get("Host", "")):
            raise web.HTTPError(403, reason="Not a name of this server")
        if self._token and not self._admitted():
            raise web.HTTPError(401, reason="Open the address with its token")

    def _admitted(self) -> bool:
        given = self.get_query_argument("token", "")
        given = given or self.get_cookie(self._cookie) or ""
        return hmac.compare_digest(given.encode(), self._token.encode())

    @property
    def _cookie(self) -> str:
        # Cookies do not know ports, so that two servers need two names.
        return f"meka-{urlsplit('//' + self.request.host).port or 80}"

    def write_error(self, status_code: int, **_: Any) -> None:
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{status_code} {self._reason}\n")

    def head(self) -> None:
        self.get()

    def get(self) -> None:
        raise web.HTTPError(404)


class _Page(_Handler):
    def initialize(self, command: str, **rest: Any):
        super().initialize(**rest)
        self._command = command

    def get(self) -> None:
        if self.get_query_argument("token", ""):
            # Into a cookie, and out of the address bar, the history and the logs.
            self.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict")
            self.redirect("/")
            return
        nonce = secrets.token_urlsafe(16)
        policy = POLICY.format(scripts=f"'nonce-{nonce}'", connect="'self'")
        policy += "; frame-ancestors 'none'"
        self.set_header("Content-Security-Policy", policy)
        runs = self.watched.since([])["runs"]
        views = [runs[str(k)] for k in range(len(runs))]
        self.finish(page(views, command=self._command, live=True, nonce=nonce))


class _Data(_Handler):
    def get(self) -> None:
        text = self.get_query_argument("known", "")
        try:
            known = [int(part) for part in text.split(",") if part]
        except ValueError:
            raise web.HTTPError(400, reason="known: numbers") from None
        self.finish(self.watched.since(known))


class Server:
    """Serves the page; `address` is where."""

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        host: str = LOOPBACK,
        port: int | None = None,
        token: str = "",
        command: str = "meka watch",
    ):
        """Listen, from now on; answer once `run` is awaited.

        Args:
            paths: run folders, there or not.
            host: the address to listen on; any but a loopback needs a token.
            port: 0 for any that is free; None for the usual one or one after it.
            token: what a visitor must know.
            command: said at the foot of the page.

        Raises:
            WatchError: the port is taken, or a token is missing.
        """
        if not is_loopback(host) and not token:
            raise WatchError(
                f"--host {host} can be reached by others: add a token that they must "
                f"know, such as --token {secrets.token_urlsafe(24)} (or set MEKA_TOKEN)"
            )
        if token and len(token) < _TOKEN:
            raise WatchError(f"a token needs at least {_TOKEN} characters")
        self._watched = Watched(paths)
        listening = _bound(host, port)
        self.port = int(listening.getsockname()[1])
        shared = {
            "watched": self._watched,
            "hosts": lambda name: answers_to(name, host, self.port),
            "token": token,
        }
        application = web.Application(
            [
                ("/", _Page, {"command": command, **shared}),
                ("/data", _Data, shared),
                ("/.*", _Handler, shared),
            ],
            log_function=lambda _: None,
            compress_response=not is_loopback(host),
        )
        self._http = httpserver.HTTPServer(application)
        self._http.add_socket(listening)
        shown = "localhost" if host in ("0.0.0.0", "::") else host
        shown = f"[{shown}]" if ":" in shown else shown
        self.address = f"http://{shown}:{self.port}/"
        if token:
            self.address += f"?token={token}"

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Follow the runs until told to stop, or for ever."""
        stop = stop or asyncio.Event()
        try:
            while not stop.is_set():
                self._watched.poll()
                try:
                    await asyncio.wait_for(stop.wait(), _EVERY)
                except TimeoutError:
                    continue
        finally:
            self._http.stop()
            await self._http.close_all_connections()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def answers_to(header: str, host: str, port: int) -> bool:
    """Whether a Host header names this server and not something that points to it.

    By name only ``localhost`` and the host that was asked for; other names could be
    anyone's. By address any where others may come, else only the loopback.
    """
    try:
        parts = urlsplit(f"//{header}")
        name, given = parts.hostname or "", parts.port or 80
    except ValueError:
        return False
    if given != port or parts.path or parts.query or "@" in parts.netloc:
        return False
    if name in ("localhost", host.lower()) or is_loopback(name):
        return True
    if is_loopback(host):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _bound(host: str, port: int | None) -> socket.socket:
    """A socket on the port, or, where none was asked for, on the first that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = range(PORT, PORT + _TRIES) if port is None else [port]
    for number in wanted:
        try:
            made = socket.create_server((host, number), family=family)
            made.setblocking(False)
            return made
        except socket.gaierror as error:
            raise WatchError(f"--host {host}: {error.strerror}") from error
        except (OSError, OverflowError) as error:
            problem = error
    raise WatchError(
        f"cannot listen on {host}, port {wanted[-1]} ({problem}); "
        "choose another with --port, or 0 for any"
    )
