"""The live page's server: who may ask, for what, and what is told."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from synthetic import lines, write_run

from meka.lab.cockpit.server import Server, WatchError, answers_to
from meka.lab.metrics import METRICS

TOKEN = "correct-horse-battery"


@contextmanager
def serving(paths, **options) -> Iterator[Server]:
    """A server in a thread of its own, on any free port."""
    started, made = threading.Event(), []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def go() -> None:
        made.append(Server(paths, port=0, **options))
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        started.set()
        await made[0].run(stop)

    thread = threading.Thread(target=lambda: asyncio.run(go()))
    thread.start()
    try:
        assert started.wait(20)
        yield made[0]
    finally:
        loop, stop = loops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)


def ask(server: Server, path: str, method: str = "GET", **headers: str):
    """Status, headers and body of one answer; redirections are not followed."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=given)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", 60, ours=False)


@pytest.fixture(scope="module")
def server(run) -> Iterator[Server]:
    with serving([run, run.parent / "later"]) as made:
        yield made


def test_the_page_and_the_data_are_all_there_is(server, run):
    status, headers, body = ask(server, "/")
    assert status == 200
    assert "<h1>meka" in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers
    status, _, body = ask(server, "/data")
    answer = json.loads(body)
    assert [answer["runs"][k]["state"] for k in "01"] == ["done", "waiting"]
    assert answer["runs"]["0"]["name"] == str(run)
    for path in (
        "/metrics.jsonl",
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        f"/{run}/config.json",
        "//etc/passwd",
        "/static/js/bokeh.min.js",
        "/data/../config.json",
    ):
        assert ask(server, path)[0] == 404, path


def test_only_what_is_new_is_told(server):
    versions = json.loads(ask(server, "/data")[2])["versions"]
    known = ",".join(map(str, versions))
    assert json.loads(ask(server, f"/data?known={known}")[2])["runs"] == {}
    other = f"{versions[0]},{versions[1] - 1}"
    assert list(json.loads(ask(server, f"/data?known={other}")[2])["runs"]) == ["1"]
    assert ask(server, "/data?known=x")[0] == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_sent(server, method):
    assert ask(server, "/data", method)[0] == 405
    assert ask(server, "/", method)[0] == 405


def test_other_names_are_refused(server):
    """A site whose name was pointed to this machine must learn nothing."""
    for name in ("evil.example", f"evil.example:{server.port}", "127.0.0.1:1", ""):
        for path in ("/", "/data", "/x"):
            status, _, body = ask(server, path, Host=name)
            assert status in (400, 403), name
            assert "run" not in body
    for name in ("127.0.0.1", "localhost", "[::1]"):
        assert ask(server, "/data", Host=f"{name}:{server.port}")[0] == 200


@pytest.mark.parametrize(
    ("header", "host", "allowed"),
    [
        ("127.0.0.1:80", "127.0.0.1", True),
        ("LOCALHOST:80", "127.0.0.1", True),
        ("192.168.1.5:80", "127.0.0.1", False),
        ("192.168.1.5:80", "0.0.0.0", True),
        ("box.lan:80", "0.0.0.0", False),
        ("box.lan:80", "box.lan", True),
        ("localhost.evil.example:80", "127.0.0.1", False),
        ("127.0.0.1.evil.example:80", "0.0.0.0", False),
        ("127.0.0.1:81", "127.0.0.1", False),
        ("me@127.0.0.1:80", "127.0.0.1", False),
        ("127.0.0.1:80/x", "127.0.0.1", False),
        ("127.0.0.1:http", "127.0.0.1", False),
        ("[::1", "127.0.0.1", False),
        ("", "0.0.0.0", False),
    ],
)
def test_which_names_are_its_own(header, host, allowed):
    assert answers_to(header, host, 80) is allowed


def test_others_need_a_token(run):
    for host in ("0.0.0.0", "", "::", "192.0.2.1", "example.com"):
        with pytest.raises(WatchError, match="add a token"):
            Server([run], host=host, port=0)
    with pytest.raises(WatchError, match="at least 16 characters"):
        Server([run], host="0.0.0.0", port=0, token="short")


def test_a_token_is_asked_for_and_moves_into_a_cookie(run):
    with serving([run], host="0.0.0.0", token=TOKEN) as server:
        assert server.address == f"http://localhost:{server.port}/?token={TOKEN}"
        for path in ("/", "/data", "/x", "/?token=wrong", f"/?token={TOKEN}x"):
            assert ask(server, path)[0] == 401, path
        cookie = f"meka-{server.port}"
        assert ask(server, "/data", Cookie=f"{cookie}=wrong")[0] == 401
        status, headers, body = ask(server, f"/?token={TOKEN}")
        assert (status, headers["Location"], body) == (302, "/", "")
        given = headers["Set-Cookie"]
        assert "HttpOnly" in given
        assert "SameSite=Strict" in given
        assert ask(server, "/data", Cookie=f"{cookie}={TOKEN}")[0] == 200
        status, _, page = ask(server, "/", Cookie=f"{cookie}={TOKEN}")
        assert status == 200
        assert TOKEN not in page
        assert ask(server, "/data", Cookie=f"{cookie}={TOKEN}", Host="evil.x")[0] == 403


def test_a_taken_port_is_said(server, run):
    with pytest.raises(WatchError, match="choose another with --port"):
        Server([run], port=server.port)


def test_the_command_follows_a_run_that_is_not_there_yet(tmp_path):
    """Another process, started first; it is on 127.0.0.1 and Ctrl-C ends it."""
    command = [sys.executable, "-m", "meka", "watch", "run", "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("watching at http://127.0.0.1:")
        port = int(said.partition("127.0.0.1:")[2].partition("/")[0])

        class Other:
            pass

        other = Other()
        other.port = port  # pyright: ignore[reportAttributeAccessIssue]

        def look(until) -> dict:
            for _ in range(100):
                view = json.loads(ask(other, "/data")[2])["runs"]["0"]  # pyright: ignore
                if until(view):
                    return view
                threading.Event().wait(0.1)
            raise AssertionError(view)

        assert look(lambda view: True)["state"] == "waiting"
        write_run(tmp_path / "run", 50, ours=False, planned=200)
        look(lambda view: view["step"] == 50)
        with (tmp_path / "run" / METRICS).open("a") as more:
            more.write(lines(range(51, 201), ours=False))
        assert look(lambda view: view["state"] == "done")["step"] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert "the runs go on" in process.stdout.read()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
