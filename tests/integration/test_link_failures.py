"""After a failure, a connection reports if the outcome is known.

It repeats nothing, and survives a fork.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from streamqd import config
from streamqd.errors import RedisUnavailableError
from streamqd.model import Assignment, Lease
from streamqd.store.client import Connection, connect
from streamqd.store.fetch import Fetcher
from streamqd.store.idle_probe import wait_readable
from streamqd.store.keys import Keys
from streamqd.store.transport import Transport, error_code
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import ProcessServer
from tests.support.waiting import wait_until
from tests.support.writer import writer

NewLink = Callable[..., Connection]


@pytest.fixture
def proxied_link(proxy: FaultProxy, link: Connection) -> Iterator[Connection]:
    """A connection through the proxy to an empty server."""
    made = connect(proxy.settings, timeout=5.0, name="test:proxied")
    yield made
    made.close()


class InterruptedInTheMiddleError(Exception):
    """Raised by a signal handler in the middle of an exchange."""


# --- failures -------------------------------------------------------------------------------------


def test_connection_to_a_missing_socket_is_a_known_failure(tmp_path: Path) -> None:
    link = connect(config.Redis(url=f"unix://{tmp_path}/none.sock"), timeout=1.0, name="test")
    with pytest.raises(RedisUnavailableError, match=r"none\.sock") as caught:
        link.execute("PING")
    assert not caught.value.sent
    assert link.node.opened == 0
    link = connect(config.Redis(url="redis://no-such-host.invalid"), timeout=1.0, name="test")
    with pytest.raises(RedisUnavailableError, match="no-such-host") as caught:
        link.execute("PING")
    assert not caught.value.sent


def test_connect_is_not_repeated() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        link = connect(
            config.Redis(url=f"redis://ann:secret@127.0.0.1:{port}"), timeout=0.2, name="t"
        )
        with pytest.raises(RedisUnavailableError) as caught:
            link.execute("PING")
        assert not caught.value.sent
        listener.setblocking(False)
        listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_lost_reply_is_reported_without_a_repetition(
    proxy: FaultProxy, proxied_link: Connection, link: Connection
) -> None:
    for count, fault in enumerate((Fault.DROP_REPLY, Fault.CUT_REPLY, Fault.DROP_REPLY), 1):
        trigger = proxy.arm(fault, command="INCR")
        with pytest.raises(RedisUnavailableError) as caught:
            proxied_link.execute("INCR", "n")
        assert trigger.hit
        assert caught.value.sent
        assert not proxied_link.connected
        assert link.execute("GET", "n") == str(count).encode()
    assert proxied_link.execute("INCR", "n") == 4
    assert proxied_link.node.opened == 4


@pytest.mark.fault("F13")
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_lost_reply_anywhere_in_a_pipeline_is_reported(
    proxy: FaultProxy, proxied_link: Connection, link: Connection, nth: int
) -> None:
    trigger = proxy.arm(Fault.DROP_REPLY, command="INCR", nth=nth)
    with pytest.raises(RedisUnavailableError) as caught:
        proxied_link.pipeline([("INCR", "n")] * 3)
    assert trigger.hit
    assert caught.value.sent
    assert int(link.execute("GET", "n")) <= 3
    assert proxied_link.execute("ECHO", "right") == b"right"


def test_reset_before_execution_is_an_unknown_outcome(
    proxy: FaultProxy, proxied_link: Connection, link: Connection
) -> None:
    proxied_link.open()
    proxy.arm(Fault.CUT_BEFORE, command="INCR")
    with pytest.raises(RedisUnavailableError) as caught:
        proxied_link.execute("INCR", "n")
    assert caught.value.sent
    assert link.execute("GET", "n") is None


def test_silent_server_raises_after_the_timeout(proxy: FaultProxy, link: Connection) -> None:
    hasty = connect(proxy.settings, timeout=0.3, name="test:hasty")
    proxy.arm(Fault.SWALLOW_REPLY, command="INCR", nth=2)
    started = time.monotonic()
    with pytest.raises(RedisUnavailableError) as caught:
        hasty.pipeline([("INCR", "n")] * 4)
    assert 0.2 < time.monotonic() - started < 2.0
    assert caught.value.sent
    assert hasty.execute("ECHO", "right") == b"right"
    hasty.close()


def test_timeout_covers_the_whole_exchange(proxy: FaultProxy, link: Connection) -> None:
    """The timeout limits the whole exchange, even if each of its replies arrives in time."""
    hasty = connect(proxy.settings, timeout=0.5, name="test:hasty")
    started = time.monotonic()
    with pytest.raises(RedisUnavailableError):
        hasty.pipeline([("BLPOP", f"none{n}", "0.4") for n in range(6)])
    assert time.monotonic() - started < 0.9
    hasty.close()


def test_paused_server_raises_after_the_timeout(new_server: Callable[..., ProcessServer]) -> None:
    server = new_server()
    link = connect(server.settings, timeout=0.3, name="test")
    link.execute("SET", "n", 0)
    server.pause()
    with pytest.raises(RedisUnavailableError) as caught:
        link.execute("INCR", "n")
    assert caught.value.sent
    # The kernel accepts the connection for the stopped server, but the command that names it is
    # never answered.
    started = time.monotonic()
    with pytest.raises(RedisUnavailableError, match="cannot connect") as caught:
        link.execute("INCR", "n")
    assert time.monotonic() - started < 0.55, "connecting was tried more than once"
    assert not caught.value.sent
    server.resume()
    assert link.execute("ECHO", "right") == b"right"
    assert link.execute("GET", "n") == b"1"
    link.close()


def test_incomplete_command_counts_as_not_sent(new_server: Callable[..., ProcessServer]) -> None:
    server = new_server()
    link = connect(server.settings, timeout=0.3, name="test")
    large = b"x" * (16 << 20)  # more than the buffers of the socket hold
    for commands, sent in (
        ([("SET", "large", large)], False),
        ([("SET", "small", "1"), ("SET", "large", large)], True),
    ):
        link.open()
        server.pause()
        with pytest.raises(RedisUnavailableError) as caught:
            link.pipeline(commands)
        assert caught.value.sent is sent
        server.resume()
        assert link.execute("EXISTS", "large") == 0
    assert link.execute("EXISTS", "small") == 1
    link.close()
    # Once the server reads, even after a long time, the whole command gets through.
    link = connect(server.settings, timeout=30.0, name="test")
    assert link.execute("SET", "large", large) == b"OK"
    assert link.execute("STRLEN", "large") == len(large)
    link.close()


def test_killed_server_raises_and_reconnects(fresh_server: ProcessServer) -> None:
    link = connect(fresh_server.settings, timeout=2.0, name="test")
    link.execute("SET", "a", "1")
    fresh_server.kill()
    with pytest.raises(RedisUnavailableError) as caught:
        link.execute("SET", "a", "2")
    assert not caught.value.sent
    fresh_server.restart()
    assert link.execute("GET", "a") == b"1"
    link.close()


def test_connection_lost_while_idle_is_replaced_silently(
    link: Connection, new_link: NewLink
) -> None:
    idle = new_link(name="test:idle")
    number = idle.execute("CLIENT", "ID")
    link.execute("CLIENT", "KILL", "ID", number)
    assert idle.execute("INCR", "n") == 1
    assert idle.node.opened == 2


def test_unread_reply_closes_the_connection(link: Connection) -> None:
    sock = link.node.socket()
    sock.sendall(b"*2\r\n$4\r\nECHO\r\n$5\r\nwrong\r\n")
    wait_until(lambda: wait_readable(sock, 0), what="the reply has come")
    with pytest.raises(RedisUnavailableError, match="unread") as caught:
        link.execute("ECHO", "right")
    assert not caught.value.sent
    assert link.execute("ECHO", "right") == b"right"


def test_exception_from_a_signal_handler_drops_the_connection(link: Connection) -> None:
    def interrupt(_number: int, _frame: object) -> NoReturn:
        raise InterruptedInTheMiddleError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(InterruptedInTheMiddleError):
            link.pipeline([("ECHO", "old"), ("BLPOP", "none", "5")])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not link.connected
    assert link.execute("ECHO", "new") == b"new"


def test_closed_link_opens_again(link: Connection) -> None:
    link.close()
    assert not link.connected
    assert link.node.fileno() is None
    link.open()
    assert link.node.fileno() == link.node.socket().fileno()
    assert link.node.opened == 2


def test_transport_never_reconnects(link: Connection) -> None:
    """A transport never reconnects, because a command must not be sent on any other connection."""
    transport = link.node.open_transport()
    link.close()
    with pytest.raises(RedisUnavailableError) as caught:
        transport.send([b"PING\r\n"])
    assert not caught.value.sent
    with pytest.raises(RedisUnavailableError, match="closed"):
        transport.receive(1, [])
    link.open()
    with pytest.raises(RedisUnavailableError):
        transport.send([b"PING\r\n"])
    assert link.node.opened == 2


# --- forking --------------------------------------------------------------------------------------


def _run_in_child(run: Callable[[], None]) -> None:
    """Run a function in a forked child. If it fails there, the test fails."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.fault("F33")
def test_detached_child_leaves_the_parents_connection_alone(link: Connection) -> None:
    number = link.execute("CLIENT", "ID")

    def child() -> None:
        descriptor = link.node.fileno()
        assert descriptor is not None
        link.detach()
        # A clean-up that comes too late must not close a descriptor that has been given to another
        # owner.
        os.close(descriptor)
        assert os.open(os.devnull, os.O_RDONLY) == descriptor
        assert link.execute("CLIENT", "ID") != number
        link.close()
        gc.collect()
        os.fstat(descriptor)

    _run_in_child(child)
    assert link.execute("CLIENT", "ID") == number
    assert link.node.opened == 1


def test_forked_child_without_detach_is_an_error(link: Connection) -> None:
    number = link.execute("CLIENT", "ID")

    def child() -> None:
        with pytest.raises(RuntimeError, match="detach"):
            link.execute("PING")
        link.close()

    _run_in_child(child)
    assert link.execute("CLIENT", "ID") == number


def test_lost_second_half_of_many_scripts_counts_as_sent(
    proxy: FaultProxy, proxied_link: Connection, link: Connection
) -> None:
    link.execute("SCRIPT", "FLUSH")
    link.run(writer("a", "0"))
    known, unknown = writer("a", "1"), writer("b", "2", name="other")
    # The server has run the scripts that it knows, and is gone before the other one can be loaded.
    proxied_link.open()
    proxy.refusing = True
    trigger = proxy.arm(Fault.CUT_AFTER, command="EVALSHA", nth=2)
    with pytest.raises(RedisUnavailableError) as caught:
        proxied_link.run_many([known, unknown])
    assert trigger.hit
    assert caught.value.sent
    assert link.execute("MGET", "a", "b") == [b"1", None]
    # If the server knows none of the scripts, it has executed nothing.
    proxy.refusing = False
    proxied_link.open()
    proxy.refusing = True
    proxy.arm(Fault.CUT_AFTER, command="EVALSHA")
    with pytest.raises(RedisUnavailableError):
        proxied_link.run_many([unknown])
    assert link.execute("EXISTS", "b") == 0


# --- attacks on the connection --------------------------------------------------------------------


def test_signal_during_packing_does_not_crash_the_process() -> None:
    """The process survives a signal handler that raises. hiredis would write to a null pointer."""
    code = """
import signal, time
from streamqd.store.transport import pack

class Sudden(Exception):
    pass

def strike(*_):
    raise Sudden

signal.signal(signal.SIGALRM, strike)
struck = 0
while struck < 2_000:
    try:
        signal.setitimer(signal.ITIMER_REAL, 20e-6)
        while True:
            pack(("EVALSHA", "x", 12345, 67890, 1.5))
    except Sudden:
        struck += 1
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unread_reply_is_not_returned_to_a_later_command(
    link: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later command never gets the unread reply of an earlier one.

    A signal handler may raise between sending and reading.
    """

    def interrupted(_count: int) -> NoReturn:
        raise InterruptedInTheMiddleError

    with monkeypatch.context() as patch:
        patch.setattr(link.node, "collect", interrupted)
        with pytest.raises(InterruptedInTheMiddleError):
            link.execute("ECHO", "one")
    opened = link.node.opened
    assert link.execute("ECHO", "two") == b"two"
    assert link.node.opened == opened + 1


def test_connection_reports_a_refusal_at_accept() -> None:
    """The connection reports why it was refused.

    The server sends the reason before it reads the login, and then closes.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            for _ in range(2):
                with listener.accept()[0] as client:
                    client.sendall(b"-ERR max number of clients reached\r\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        port = listener.getsockname()[1]
        try:
            for url in (f"redis://ann:secret@127.0.0.1:{port}/2", f"redis://127.0.0.1:{port}"):
                refusal = r"refused the connection: .*max number of clients"
                with pytest.raises(RedisUnavailableError, match=refusal):
                    connect(config.Redis(url=url), timeout=5.0, name="test").execute("PING")
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # or the thread waits forever after a failure
            thread.join()


def test_fence_without_watch_permission_stops_reads(
    server: ProcessServer, link: Connection, keys: Keys
) -> None:
    """A worker that loses the permission for WATCH stops reading.

    It would otherwise read without a fence.
    """
    assignment = Assignment("access", 0, "hits")
    link.execute("HSET", keys.fence(*assignment), "token", "ours")
    for stream in (keys.source(*assignment), keys.retry_stream(*assignment)):
        link.execute("XGROUP", "CREATE", stream, assignment.group, "$", "MKSTREAM")
    link.execute("ACL", "SETUSER", "weak", "reset", "on", "nopass", "~*", "&*", "+@all")
    settings = replace(server.settings, username="weak")
    own = connect(settings, timeout=5.0, name="test:weak")
    fetcher = Fetcher(own, keys, Lease(assignment, "ours", 1))
    assert fetcher.watch()
    link.execute("ACL", "SETUSER", "weak", "-watch")
    fetcher.send_round([], [], 10)
    with pytest.raises(RedisUnavailableError, match="cannot be watched"):
        fetcher.receive_round(polled=False)
    assert not own.connected
    link.execute("ACL", "DELUSER", "weak")


@pytest.mark.parametrize("code", ["READONLY", "OOM", "MASTERDOWN"])
def test_discarded_transaction_has_the_code_of_its_cause(code: str) -> None:
    assert error_code(f"EXECABORT Transaction discarded because of: {code} You can't") == code
    previous = "EXECABORT Transaction discarded because of previous errors."
    assert error_code(previous) == "EXECABORT"


def test_transaction_without_exec_counts_as_not_sent() -> None:
    """A transaction without EXEC counts as not sent, because the server executes no part of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        opened = Transport(ours, "there")
        opened.begin(0.05)
        with pytest.raises(RedisUnavailableError) as caught:
            opened.send([b"MULTI", b"x" * (1 << 20), b"EXEC"], needed=3)
        assert not caught.value.sent
        opened.begin(0.05)
        with pytest.raises(RedisUnavailableError) as caught:
            opened.send([b"x", b"x" * (1 << 20)])
        assert not caught.value.sent, "not sent, because the buffer is full"
