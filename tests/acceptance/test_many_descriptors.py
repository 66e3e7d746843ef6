"""Daemons and commands work with more than 1,024 open file descriptors, the limit of `select`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.acceptance.test_top import command, environment
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.terminal import Terminal

NewDaemon = Callable[..., Daemon]

pytestmark = pytest.mark.promise

# This program runs a command that inherits 1,100 open file descriptors.
CROWDED = """
import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
for _ in range(1100):
    os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
os.execvp(sys.argv[1], sys.argv[1:])
"""
WITHIN = [sys.executable, "-c", CROWDED]
RETRIES = """
import asyncio
from streamqd import Message, Retry
from tests.support.ledger import Ledger

ledger = Ledger.from_environment("1", durable=False)


async def obey(message: Message) -> None:
    with ledger.run(message):
        await asyncio.sleep(0.0101)
        if message.attempt == 1:
            raise Retry(after=0.1)
"""


@pytest.mark.parametrize("concurrency", [1, 8])
def test_daemon_with_1100_open_descriptors_works(new_daemon: NewDaemon, concurrency: int):
    """The housekeeper does not crash, although its socket has a number above 1,023."""
    consumer = {"concurrency": concurrency, "order": "none"} if concurrency > 1 else {}
    daemon = new_daemon(partitions=2, code=RETRIES, consumer=consumer)
    daemon.within = WITHIN
    with daemon:
        uids = daemon.send(["x"] * 20)
        daemon.wait_settled()
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert daemon.events("housekeeper.exited") == []
        assert daemon.stop() == 0


def test_top_with_1100_open_descriptors_receives_keys(new_daemon: NewDaemon):
    """`top` receives keys, although its pipe has a number that `select` would reject."""
    with new_daemon(partitions=2) as daemon:
        words = command(daemon, "top", "--interval", "0.2s")
        terminal = Terminal([*WITHIN, *words], cwd=daemon.folder, env=environment())
        with terminal as top:
            top.wait_text(f"{TOPIC}/1")
            top.type("q")
            assert top.wait_end() == 0
        assert daemon.stop() == 0
