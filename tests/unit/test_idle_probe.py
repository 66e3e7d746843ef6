"""A probe distinguishes a slow server from a dead connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from streamqd.errors import SilentConnectionError
from streamqd.store import idle_probe
from streamqd.store.idle_probe import Attempts, IdleProbe

SOON = 0.02  # seconds of silence before the first probe


@pytest.fixture
def socket_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the two sockets of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


class Prober:
    """A probe that always gives the same answer and counts its calls."""

    def __init__(self, *answers: bool, then: socket.socket | None = None) -> None:
        self.answers = list(answers)
        self.then = then  # the socket that sends the overdue answer with the probe's
        self.asked = 0

    def __call__(self, seconds: float) -> bool:
        assert 0 < seconds <= idle_probe.PROBE_SECONDS
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else False
        if self.then is not None and not self.answers:
            self.then.send(b"+OK")
        return answer


def test_silent_connection_is_dead_if_a_new_one_is_answered(socket_pair) -> None:
    """A silent connection counts as dead if the server answers a new one."""
    prober = Prober(True)
    with pytest.raises(SilentConnectionError, match="a new connection was answered") as raised:
        IdleProbe(SOON, prober).await_reply(socket_pair[0], time.monotonic() + 60)
    assert raised.value.sent, "the command may have been executed"
    assert prober.asked == 1


def test_available_reply_is_read_without_a_probe(socket_pair) -> None:
    """A process that was stopped for a while reads the answer that has arrived, without a probe."""
    socket_pair[1].send(b"+OK")
    prober = Prober(True)
    IdleProbe(SOON, prober).await_reply(socket_pair[0], time.monotonic() - 1)
    assert prober.asked == 0


def test_connection_closed_by_the_server_is_not_probed(socket_pair) -> None:
    socket_pair[1].close()
    prober = Prober(True)
    IdleProbe(SOON, prober).await_reply(socket_pair[0], time.monotonic() + 60)
    assert prober.asked == 0, "reading from the connection raises the real error"


def test_reply_right_after_the_probe_reply_is_accepted(socket_pair) -> None:
    """The reply is accepted, because both answers came from a slow server.

    The next probe comes later.
    """
    prober = Prober(True, then=socket_pair[1])
    one = IdleProbe(SOON, prober)
    one.await_reply(socket_pair[0], time.monotonic() + 60)
    assert prober.asked == 1
    one.record_late_reply(1.2)
    assert (
        idle_probe.PROBE_AFTER_MAX
        <= one.seconds_until_probe()
        <= idle_probe.PROBE_AFTER_MAX * 9 / 8
    ), "the most"
    one.record_late_reply(0.5)
    assert 1.0 <= one.seconds_until_probe() <= 1.0 * 9 / 8


def test_longer_wait_after_a_late_reply_expires(
    socket_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_probe, "SLOW_SERVER_SECONDS", 0.0)
    one = IdleProbe(SOON, Prober())
    one.record_late_reply(1.0)
    assert one.seconds_until_probe() <= SOON * 9 / 8


def test_silent_server_gets_few_probes(socket_pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between probes limit the number of connections, and a late answer is still read."""
    monkeypatch.setattr(idle_probe, "PAUSE_SECONDS", (0.1, 0.4))
    prober = Prober()
    timer = threading.Timer(1.0, lambda: socket_pair[1].send(b"+OK"))
    timer.start()
    IdleProbe(SOON, prober).await_reply(socket_pair[0], time.monotonic() + 60)
    timer.join()
    assert 1 <= prober.asked <= 4, "after 0.02 s, and after pauses of 0.1, 0.2 and 0.4 s"


def test_wait_for_a_reply_raises_at_its_deadline(socket_pair) -> None:
    with pytest.raises(TimeoutError):
        IdleProbe(SOON, Prober()).await_reply(socket_pair[0], time.monotonic() + 0.1)


def test_connect_timeout_grows_only_after_a_timeout() -> None:
    """The timeout grows only after a timeout.

    A lost login is repeated within a second, while a slow server still gets enough time.
    """
    attempts = Attempts()
    limits = []
    for _ in range(6):
        limits.append(attempts.limit())
        attempts.record(attempts.limit())
    assert limits == [1.0, 1.0, 1.0, 2.0, 4.0, 8.0]
    attempts.record(0.1)
    assert attempts.limit() == 1.0, "answered, or refused at once: the server is not slow"
