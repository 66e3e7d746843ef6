"""A server answers, but refuses all commands for a while: LOADING, BUSY, MASTERDOWN."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from streamqd import config
from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.producer import Producer
from streamqd.store.client import Connection, connect
from tests.faults.test_servers_that_fail import TTL, settle_after
from tests.support.daemon import Daemon
from tests.support.servers import ProcessServer, free_port
from tests.support.waiting import wait_until

Make = Callable[..., Daemon]
ENDLESS = "while true do end"
# A loading server serves its clients once per 2 MiB.
FILLER = "for n = 1, 400 do redis.call('SETRANGE', 'filler:' .. n, 200000, 'x') end"
MANY = 400  # most calls of an instance refused in three TTLs; more would be a busy loop


class Refusal:
    """A state in which a server refuses every call and gives the reason."""

    def __init__(self, server: ProcessServer) -> None:
        self.server = server
        self.link = connect(server.settings, timeout=20.0, name="test:refusal")

    code = ""

    def begin(self) -> None:
        """Start the refusal."""

    def end(self) -> None:
        """End the refusal."""

    def holds(self) -> bool:
        """Return True if the server is refusing commands now."""
        # The check is a single read command, because other commands may be refused for other
        # reasons.
        return reply_or_code(self.link, "EXISTS", "probe") == self.code


class Loading(Refusal):
    """A server that was killed and is slowly loading a large file while it starts."""

    code = "LOADING"
    delay = 20_000  # microseconds for each of 400 keys, until the delay is removed

    def begin(self) -> None:
        self.link.execute("CONFIG", "SET", "rdbcompression", "no")
        self.link.execute("EVAL", FILLER, 0)
        self.link.execute("BGREWRITEAOF")
        wait_until(self._rewritten, timeout=20.0, what="the file is rewritten")
        self.server.restart(wait=False, key_load_delay=str(self.delay))

    def _rewritten(self) -> bool:
        told = self.link.execute("INFO", "persistence").decode()
        return "aof_rewrite_in_progress:0" in told and "aof_rewrite_scheduled:0" in told

    def end(self) -> None:
        with suppress(RedisResponseError):  # 6.2 lacks this setting, but becomes ready anyway
            self.link.execute("CONFIG", "SET", "key-load-delay", "0")


class Busy(Refusal):
    """A server that is busy with another client's script, which never returns."""

    code = "BUSY"

    def begin(self) -> None:
        self.link.execute("CONFIG", "SET", "lua-time-limit", "10")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        link = connect(self.server.settings, timeout=60.0, name="test:busy")
        with pytest.raises(RedisResponseError):  # the script is killed
            link.execute("EVAL", ENDLESS, 0)
        link.close()

    def end(self) -> None:
        self.link.execute("SCRIPT", "KILL")
        self._thread.join(20.0)
        assert not self._thread.is_alive()


class MasterDown(Refusal):
    """A replica that cannot reach its master and may not serve old data."""

    code = "MASTERDOWN"

    def begin(self) -> None:
        self.link.execute("CONFIG", "SET", "replica-serve-stale-data", "no")
        self.link.execute("REPLICAOF", "127.0.0.1", free_port())

    def end(self) -> None:
        self.link.execute("REPLICAOF", "NO", "ONE")


every_refusal = pytest.mark.parametrize("kind", [Loading, Busy, MasterDown])


@contextmanager
def refusing(refusal: Refusal) -> Iterator[None]:
    """Make the server refuse commands while the block runs, and always end the refusal."""
    refusal.begin()
    try:
        wait_until(refusal.holds, timeout=20.0, what=f"{refusal.code} is answered")
        yield
        assert refusal.holds(), f"{refusal.code} was over too soon"
    finally:
        refusal.end()
    wait_until(
        lambda: reply_or_code(refusal.link, "EXISTS", "probe") == 0,
        timeout=20.0,
        what="it serves again",
    )


def reply_or_code(link: Connection, *command: str) -> Any:
    """Return a server's reply, the code of its refusal, or '' if there is no answer."""
    try:
        return link.execute(*command)
    except RedisResponseError as error:
        return error.code
    except RedisUnavailableError:
        return ""


def read_statistic(link: Connection, section: str, name: str) -> int:
    """Return a statistic that the server has counted since its start."""
    for line in link.execute("INFO", section).decode().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.partition("=")[2].partition(",")[0])
    return 0


@pytest.mark.fault("F16")
@every_refusal
def test_refusing_server_delays_but_charges_no_message(
    make: Make, fresh_server: ProcessServer, kind: type[Refusal]
):
    """For three TTLs, nothing is read, repeated, charged or taken over, and no process spins."""
    refusal = kind(fresh_server)
    with make(partitions=2, daemon={"lease_ttl": f"{TTL}s"}) as daemon:
        state = refusing(refusal)
        counted: list[int] = []

        def refuse() -> None:
            state.__enter__()

        def accept() -> None:
            state.__exit__(None, None, None)
            counted.append(read_statistic(refusal.link, "errorstats", f"errorstat_{refusal.code}"))

        settle_after(daemon, refuse, accept)
        print(f"refused with {refusal.code}: {counted[0]} calls in three ttls")
        assert counted[0] > 10, "the daemon was not refused"
        assert counted[0] < MANY, "it spins"
        assert daemon.letters() == daemon.traces() == []
        for word in ("redis.lost", "redis.recovered"):
            assert daemon.events(word, role="supervisor"), "it says that it waits, and for what"
    refusal.link.close()


@pytest.mark.fault("F16")
@every_refusal
def test_producer_gets_an_error_or_repeats_if_safe(
    make: Make, fresh_server: ProcessServer, kind: type[Refusal]
):
    refusal = kind(fresh_server)
    daemon = make()
    settings = config.load(daemon.config_path)
    with Producer(settings=settings) as producer:
        producer.send("orders", "before", partition=0)
        with refusing(refusal), pytest.raises((RedisResponseError, RedisUnavailableError)) as error:
            producer.send("orders", "refused", partition=0)
        assert not getattr(error.value, "sent", False), "it is known that it was not sent"
        producer.send("orders", "after", partition=0)
    found = daemon.link.execute("XRANGE", daemon.keys.stream("orders", 0), "-", "+")
    assert [dict(zip(f[::2], f[1::2], strict=True))[b"payload"] for _, f in found] == [
        b"before",
        b"after",
    ]
    refusal.link.close()


@pytest.mark.fault("F16")
def test_daemon_start_waits_for_a_loading_server(make: Make, fresh_server: ProcessServer):
    daemon = make()
    (uid,) = daemon.send(["ok"])
    refusal = Loading(fresh_server)
    refusal.delay //= 2  # the daemon waits for five seconds
    with refusing(refusal):
        daemon.start()
        # No other client asks the server for the time.
        daemon.wait_for(
            lambda: read_statistic(refusal.link, "commandstats", "cmdstat_time") > 2,
            what="it has asked",
        )
        assert daemon.running
    daemon.wait_run(uid, "end", timeout=30.0)
    daemon.wait_settled()
    assert daemon.stop() == 0
    refusal.link.close()
