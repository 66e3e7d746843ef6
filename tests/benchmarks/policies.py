"""Measure the cost of key order when some messages fail: `make bench NAME=policies`.

There is one private server, one worker in this process, a handler that does almost nothing, and a
backlog of many keys. With requeue, a dedicated thread plays the housekeeper's part and brings
retries back, so the figures show requeue at its best. The figures are from one machine, so compare
the ratios to the same policy without failures, and to requeue. CPU is that of the whole process. On
a busy machine, CPU says more than the throughput.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamqd.config import Settings
from streamqd.message import Message
from streamqd.model import Backoff
from streamqd.scoreboard import Scoreboard
from streamqd.store import messages
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from tests.benchmarks.quick import machine, server
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support import life

POLICIES: dict[str, dict[str, Any]] = {
    "requeue": {"on_error": "requeue"},
    "hold-key": {"on_error": "hold-key"},
    "requeue, order = key, 8 at a time": {"on_error": "requeue", "concurrency": 8},
    "hold-key, order = key, 8 at a time": {"on_error": "hold-key", "concurrency": 8},
}
BACKOFF = Backoff("fixed", 0.05, 0.05, "none")
FILL = 500  # entries per write
SHARES = (0.0, 0.01, 0.05)

Found = dict[tuple[str, float], list[tuple[float, float]]]  # (rate, CPU) of each round


def main() -> None:
    """Run all measurements, and print JSON."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--messages", type=int, default=50_000)
    arguments.add_argument("--keys", type=int, default=10_000)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    life.PATIENCE = 600.0
    results: dict[str, Any] = {"machine": machine(), **vars(options), "output": None}
    with server(aof=False) as path:
        # The policies run round by round, so that other load on the machine affects all of them
        # alike.
        found: Found = {(name, share): [] for name in POLICIES for share in SHARES}
        for _ in range(options.rounds):
            for name, share in found:
                found[name, share].append(run(path, options, POLICIES[name], share))
    results["policies"] = {name: summarize(found, name) for name in POLICIES}
    print(json.dumps(results, indent=2))
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


def summarize(found: Found, name: str) -> dict[str, Any]:
    """Return the medians of a policy, and its throughput relative to no failures and to requeue."""

    def median(policy: str, share: float, what: int) -> float:
        return statistics.median(each[what] for each in found[policy, share])

    peer = name.replace("hold-key", "requeue", 1)
    return {
        f"{share:.0%} of the messages fail once": {
            "messages/s": round(median(name, share, 0)),
            "CPU us/message": round(median(name, share, 1), 1),
            "throughput to that without failures": _ratio(found, (name, share), (name, 0.0)),
            "throughput to requeue": _ratio(found, (name, share), (peer, share)),
        }
        for share in SHARES
    }


def _ratio(found: Found, one: tuple[str, float], other: tuple[str, float]) -> float:
    """Return the median of the ratios of the rounds."""
    pairs = zip(found[one], found[other], strict=True)
    return round(statistics.median(mine[0] / its[0] for mine, its in pairs), 3)


def run(
    path: str, options: argparse.Namespace, policy: dict[str, Any], share: float
) -> tuple[float, float]:
    """Return messages/s and the CPU us per message. Each message counts once."""
    settings = replace(Settings().redis, url=f"unix://{path}")
    link = connect(settings, timeout=10.0, name="bench:fill")
    link.execute("FLUSHALL")
    harness = Harness(link, Keys())
    harness.groups()
    harness.own("t1")
    chance = random.Random(1)
    fill(link, harness.stream, options.messages, options.keys, chance)
    fails = {number for number in range(options.messages) if chance.random() < share}
    slot = Scoreboard(1).allot(ASSIGNMENT)

    def work(message: Message) -> None:
        if message.attempt == 1 and int(message.payload) in fails:
            raise ValueError

    with life.open_lives(slot) as make:
        worker = make(f"unix://{path}").worker(
            "t1",
            max_messages=options.messages + len(fails),
            backoff=BACKOFF,
            held_max=20_000,
            **policy,
        )
        over = threading.Event()
        promoter = threading.Thread(target=promote, args=(path, over))
        promoter.start()
        began, cpu = time.monotonic(), time.process_time()
        try:
            make(f"unix://{path}").run(worker, work)
        finally:
            over.set()
            promoter.join()
        count = options.messages
        took = count / (time.monotonic() - began), (time.process_time() - cpu) / count * 1e6
    link.close()
    return took


def fill(link: Connection, stream: str, count: int, keys: int, chance: random.Random) -> None:
    """Write a backlog. Each entry has a random key, and its number as the payload."""
    for first in range(0, count, FILL):
        link.pipeline(
            [
                ("XADD", stream, "*", "payload", number, "key", f"k{chance.randrange(keys)}")
                for number in range(first, min(first + FILL, count))
            ]
        )


def promote(path: str, over: threading.Event) -> None:
    """Promote retries that are due, continually."""
    link = connect(
        replace(Settings().redis, url=f"unix://{path}"), timeout=10.0, name="bench:retry"
    )
    while not over.wait(0.005):
        link.run(messages.promote_retries(Keys(), ASSIGNMENT, 256))
    link.close()


if __name__ == "__main__":
    main()
