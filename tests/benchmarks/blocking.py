"""Measure how long each script blocks the server, by body size: `make bench NAME=blocking`.

The benchmark calls each script whose work grows with its input, on a private server, with as much
input as its callers ever use. The times come from the server's slow log. A busy machine interrupts
the server in the middle of a script, so each case runs several times: the shortest time is that of
the script itself, and the longest includes interruptions. With --first, the kernel schedules the
server ahead of all other processes, if this is permitted.

Everything that copies bodies is bounded by bytes (tests/contract/test_bytes.py). This benchmark
shows the effect of that bound on this machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from streamqd.housekeeper import dead_letter_expirer, promoter, retention_enforcer, trimmer
from streamqd.store import (
    adoption,
    dead,
    groups,
    leases,
    messages,
    publishing,
    retries,
    scripts,
    spark,
)
from streamqd.store import retention as trimming
from streamqd.store import statistics as figures
from streamqd.store.client import connect
from streamqd.store.items import BYTES_MAX, portions
from streamqd.store.keys import Keys
from streamqd.store.messages import ITEMS_MAX, PLACES_MAX
from streamqd.store.scripts import Call
from streamqd.worker.recovery import RECOVER_PAGE
from streamqd.worker.settler import BATCH_MAX
from tests.benchmarks.quick import machine
from tests.contract.harness import OWNER, TTL, Harness
from tests.contract.scenarios import drop_all, trim_all
from tests.support import costs
from tests.support.servers import ProcessServer, find_binary

BAR_MS = 5.0
BODIES = (100, 4 << 10, 32 << 10, 128 << 10, 1 << 20)
FULL_BYTES = 96 << 20  # most bytes of stored bodies
LETTER = {b"reason": b"attempts", b"errorClass": b"ValueError", b"traceback": b"t" * 8192}
PATH = ("access", 0)

Case = Callable[[Harness, str], Iterator[Call]]


def entry_count(most: int, body: str) -> int:
    """Return how many entries with this body fit, up to `most`."""
    return max(2, min(most, FULL_BYTES // len(body)))


def make_pending(harness: Harness, body: str, most: int, consumer: str = "w") -> list[bytes]:
    """Make up to `most` entries pending, as many as fit. Return their places."""
    harness.groups()
    count = entry_count(most, body)
    costs.seed_backlog(harness, count, body)
    harness.own("t1")
    harness.do("HSET", harness.fence, "session", "s1")
    return [b"m:" + entry for entry in harness.fetch(count, consumer)]


def make_due(harness: Harness, body: str, most: int) -> list[str]:
    """Make up to `most` retries and delayed sends due, if they fit. Return the retries' places."""
    harness.groups()
    costs.seed_delayed(harness, entry_count(most, body), body)
    for key in (harness.delayed, harness.delayed_sends):
        harness.do("ZUNIONSTORE", key, 1, key, "WEIGHTS", 0.5)
    return [each.decode() for each in harness.do("ZRANGE", harness.delayed, 0, -1)]


def promote(harness: Harness, body: str) -> Iterator[Call]:
    make_due(harness, body, promoter.PAGE)
    yield messages.promote_retries(harness.keys, harness.assignment, promoter.PAGE)
    yield messages.promote_delayed(harness.keys, *PATH, promoter.PAGE)


def settle(harness: Harness, body: str) -> Iterator[Call]:
    places = make_pending(harness, body, 2 * BATCH_MAX)
    half = len(places) // 2
    size = lambda _: len(body)  # noqa: E731
    for part in portions(places[:half], size, BATCH_MAX):
        yield messages.retry(
            harness.keys, harness.leased("t1"), [(each, 60.0, {}) for each in part]
        )
    for part in portions(places[half:], lambda _: len(body) + 8192, BATCH_MAX):
        yield messages.dead(harness.keys, harness.leased("t1"), [(each, LETTER) for each in part])


def settle_small(harness: Harness, body: str) -> Iterator[Call]:
    places = make_pending(harness, body, 3 * PLACES_MAX)
    third = min(PLACES_MAX, len(places) // 3)
    yield messages.ack(harness.keys, harness.leased("t1"), places[:third])
    notes = [(each, 1, 5.0) for each in places[third : 2 * third][:BATCH_MAX]]
    yield messages.note(harness.keys, harness.leased("t1"), notes)
    running, done = places[third], places[-third:]
    yield leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, running, b"signal 9", done)


def recover(harness: Harness, body: str) -> Iterator[Call]:
    make_pending(harness, body, RECOVER_PAGE)
    yield messages.recover(harness.keys, harness.leased("t1"), "s1", True, "", "", RECOVER_PAGE)


def reclaim(harness: Harness, body: str) -> Iterator[Call]:
    make_pending(harness, body, RECOVER_PAGE, "foreign")
    yield messages.reclaim(harness.keys, harness.leased("t1"), "s1", "m", 0.0, RECOVER_PAGE)


def reclaim_among_fresh(harness: Harness, body: str) -> Iterator[Call]:
    """Skip entries that are not idle yet, one page at a time."""
    make_pending(harness, body, 100_000, "foreign")
    yield messages.reclaim(harness.keys, harness.leased("t1"), "s1", "m", 600.0, RECOVER_PAGE)


def read_when_full(harness: Harness, body: str) -> Iterator[Call]:
    make_pending(harness, body, 2)
    count = max(1, min(ITEMS_MAX // 8, BYTES_MAX // len(body)))
    costs.seed_backlog(harness, count, body)
    yield messages.fetch(harness.keys, harness.leased("t1"), "s1", count)


def adopt(harness: Harness, body: str) -> Iterator[Call]:
    make_pending(harness, body, 1000, "foreign")
    harness.do("DEL", harness.fence, harness.lease)
    yield adoption.adopt(harness.keys, harness.assignment, "m")


def read_dead_letters(harness: Harness, body: str) -> Iterator[Call]:
    harness.groups()
    costs.seed_dead_letters(harness, entry_count(PLACES_MAX + ITEMS_MAX + 1, body), body)
    ids = [entry[0].decode() for entry in harness.do("XRANGE", harness.dlq, "-", "+", "COUNT", 1)]
    yield dead.replay(harness.keys, *PATH, ids[0], harness.assignment.group, {})
    yield dead.purge_before(harness.keys, *PATH, "9999999999999-0", dead_letter_expirer.PAGE)
    named = harness.do("XRANGE", harness.dlq, "-", "+", "COUNT", PLACES_MAX)
    yield dead.purge(harness.keys, *PATH, [entry[0].decode() for entry in named])


def page_retries(harness: Harness, body: str) -> Iterator[Call]:
    places = make_due(harness, body, BATCH_MAX)
    yield retries.page(harness.keys, harness.assignment, (0, ""), 200)
    yield retries.make_due(harness.keys, harness.assignment, places)
    for part in portions(places, lambda _: len(body), BATCH_MAX):
        items = [(each, {b"reason": b"canceled"}) for each in part]
        yield retries.cancel(harness.keys, harness.assignment, items, drop=False)


def measure(harness: Harness, body: str) -> Iterator[Call]:
    make_pending(harness, body, 1000)
    costs.seed_backlog(harness, entry_count(100_000, body) // 2, body)
    costs.seed_undue_entries(harness, entry_count(10_000, body) // 8)
    yield figures.measure_partition(harness.keys, *PATH)
    yield figures.measure_assignment(harness.keys, harness.assignment)
    yield trimming.measure(harness.keys, *PATH)
    yield messages.snapshot(harness.keys, harness.assignment)
    yield spark.step(harness.stream, "0-0", "9999999999999-0", spark.STEP_MAX)
    fields = [b"payload", body.encode()]
    yield publishing.publish(harness.keys, *PATH, fields, "order-1", 60.0, max_backlog=10**6)
    yield publishing.schedule(harness.keys, *PATH, 5.0, "send-1", fields, "order-2", 60.0)


def trim(harness: Harness, body: str) -> Iterator[Call]:
    make_pending(harness, body, 1)
    harness.do(
        "XACK",
        harness.stream,
        harness.assignment.group,
        harness.do("XRANGE", harness.stream, "-", "+")[0][0],
    )
    costs.seed_backlog(harness, entry_count(2 * trimmer.PAGE, body), body)
    harness.do("XGROUP", "SETID", harness.stream, harness.assignment.group, "$")
    yield trim_all(harness, max_length=1, max_bytes=1, limit=trimmer.PAGE)


def drop(harness: Harness, body: str) -> Iterator[Call]:
    harness.groups()
    costs.seed_backlog(harness, entry_count(2 * retention_enforcer.PAGE, body), body)
    yield drop_all(harness, drop_before="9999999999999-0", limit=retention_enforcer.PAGE)


def drop_nothing(harness: Harness, body: str) -> Iterator[Call]:
    """Read all entries, because the bound lies within a node."""
    harness.groups()
    count = entry_count(20_000, body)
    costs.seed_backlog(harness, count, body)
    harness.do("XGROUP", "SETID", harness.stream, harness.assignment.group, "$")
    yield drop_all(harness, drop_before="0-0", max_length=count - 1, limit=retention_enforcer.PAGE)


def reset_and_delete_group(harness: Harness, body: str) -> Iterator[Call]:
    make_pending(harness, body, 10_000)
    make_due(harness, body, 10_000)
    for _ in range(1 + (10_000 - groups.AT_ONCE_MAX) // groups.PART_MAX):
        yield groups.reset(
            harness.keys,
            harness.assignment,
            "0-0",
            drop_retries=True,
            force=True,
            keeper="",
            token="t3",
        )
    harness.fetch(10_000)
    harness.own("t2", owner=OWNER, seen_epoch=int(harness.do("HGET", harness.fence, "epoch") or 0))
    for _ in range(1 + (10_000 - groups.AT_ONCE_MAX) // groups.PART_MAX):
        yield groups.delete(harness.keys, harness.assignment, force=True, token="t4")


def settle_missing(harness: Harness, body: str) -> Iterator[Call]:
    make_pending(harness, body, retention_enforcer.MISSING)
    harness.do("XTRIM", harness.stream, "MAXLEN", 0)
    yield trimming.settle_missing(harness.keys, harness.assignment, retention_enforcer.MISSING)


def publish_staged(harness: Harness, body: str) -> Iterator[Call]:
    count = max(1, min(spark.ROWS_MAX, (1 << 20) // len(body)))
    staged = harness.keys.staged_rows(*PATH, "q", "a")
    harness.link.pipeline([("XADD", staged, f"0-{n + 1}", "payload", body) for n in range(count)])
    yield spark.publish(harness.keys, *PATH, "q", "a", 60)


CASES: tuple[Case, ...] = (
    *(promote, settle, settle_small, recover, reclaim, reclaim_among_fresh, read_when_full, adopt),
    *(
        read_dead_letters,
        page_retries,
        measure,
        trim,
        drop,
        drop_nothing,
        reset_and_delete_group,
        settle_missing,
        publish_staged,
    ),
)


def main() -> None:
    """Run every case with every body, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, nargs="+", default=BODIES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", default="valkey")
    parser.add_argument("--only", default="", help="the name of one case")
    parser.add_argument("--first", action="store_true", help="the server runs before all others")
    parser.add_argument("--output", type=Path, default=Path("var/blocking"))
    options = parser.parse_args()
    server = ProcessServer("bench", find_binary(options.server))
    try:
        if options.first:
            server.come_first()
        found = run(server, options)
    finally:
        server.close()
    result = {"machine": machine(), "server": options.server, "ms": found}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "blocking.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.output / "blocking.md").write_text(table(found))
    print(table(found))


def run(server: ProcessServer, options: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Return the longest call of each round in ms, by script and size of bodies."""
    link = connect(server.settings, timeout=60.0, name="bench:blocking")
    found: dict[str, dict[int, list[float]]] = {}
    for size in options.bodies:
        for case in CASES:
            if options.only not in ("", case.__name__):
                continue
            for _ in range(1 + options.rounds):  # the first round loads the scripts into the server
                taken = run_case(Harness(link, Keys()), case, "x" * size)
                for name, longest in taken.items():
                    found.setdefault(name, {}).setdefault(size, []).append(longest)
    link.close()
    return {
        name: {size: times[1:] for size, times in sizes.items()}
        for name, sizes in sorted(found.items())
    }


def run_case(harness: Harness, case: Case, body: str) -> dict[str, float]:
    """Run a case on an empty server. Return the longest call of each script, in ms."""
    harness.do("FLUSHALL", "SYNC")
    found: dict[str, float] = {}
    for call in case(harness, body):
        harness.do("CONFIG", "SET", "slowlog-log-slower-than", 0)
        harness.do("SLOWLOG", "RESET")
        harness.link.run(call)
        log: list[Any] = harness.do("SLOWLOG", "GET", 20)
        harness.do("CONFIG", "SET", "slowlog-log-slower-than", -1)
        spent = max(row[2] for row in log if row[3][0].upper() in (b"EVALSHA", b"EVAL")) / 1000
        found[call.script.name] = max(found.get(call.script.name, 0.0), spent)
    return found


def table(found: dict[str, dict[int, list[float]]]) -> str:
    """Return a Markdown table: the shortest and longest time of each script for each body size."""
    sizes = sorted({size for times in found.values() for size in times})
    rows = [["ms at bodies of", *(f"{size:,} bytes" for size in sizes)], ["---"] * (1 + len(sizes))]
    for name, times in found.items():
        rows.append([f"`{name}`", *(_cell(times.get(size, [])) for size in sizes)])
    untried = sorted(scripts.load().keys() - found.keys())
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{text}\n\nOf one size whatever lies there: {', '.join(untried)}.\n"


def _cell(times: list[float]) -> str:
    if not times:
        return ""
    least, worst = min(times), max(times)
    mark = " **over**" if least > BAR_MS else ""
    return f"{least:.2f} / {worst:.2f}{mark}"


if __name__ == "__main__":
    main()
