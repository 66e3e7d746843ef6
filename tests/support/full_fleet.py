"""A fleet of ten topics with many messages and dead letters, and the console's cost for it."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from streamqd.admin import dead_letters, tail
from streamqd.console.views import ACTS, VIEWS
from tests.support.console import ConsoleProcess, command_rates, commands_sent
from tests.support.daemon import Daemon

TOPICS = (
    *("orders", "payments", "emails", "parcels", "invoices"),
    *("stock", "search-index", "audit-trail", "images", "notifications"),
)
GROUP, PARTITIONS = "bill", 2
WRITE = 1_000  # commands in a pipeline
VISITS = 3  # visits to each page
SLOW_MS = 50
PAINT_MS = 1_000
COMMANDS_MAX = 3_000  # most commands for a page, which examines at most 10,000 entries
CAUSES = 40
BODY = json.dumps({"customer": 4711, "items": ["a", "b"], "note": "x" * 60})
# Milliseconds since the navigation started. The entry may appear only after the load event.
FIRST_PAINT = """new Promise(done => new PerformanceObserver(list => {
    const entry = list.getEntriesByName("first-contentful-paint")[0];
    if (entry) done(entry.startTime);
}).observe({type: "paint", buffered: true}))"""
FIRST_BYTE = "performance.getEntriesByType('navigation')[0].responseStart"


def full_daemon(folder: Path, url: str) -> Daemon:
    """Return a daemon with ten topics of one group each, and a schedule. It is not started."""
    made = Daemon(folder, url)
    one = {"group": GROUP, "handler": "work:obey"}
    made.write_config(
        topics={topic: {"partitions": PARTITIONS} for topic in TOPICS},
        consumers=[one | {"topic": topic} for topic in TOPICS],
        schedules=[{"name": "tick", "topic": TOPICS[0], "cron": "0 3 1 1 *"}],
    )
    return made


def fill(daemon: Daemon, messages: int, letters: int, seed: int) -> None:
    """Write messages evenly to all topics, and dead letters, half of them to the first topic.

    The groups of the daemon must be paused, and one message must have been dead-lettered, because
    its dead letter is the model for the others.
    """
    keys, chance = daemon.keys, random.Random(seed)
    places = [(topic, number) for topic in TOPICS for number in range(PARTITIONS)]
    _write(
        daemon,
        (
            ("XADD", keys.stream(*places[n % len(places)]), "*", "payload", BODY, "key", f"c-{n}")
            for n in range(messages)
        ),
    )
    first = [places[n % PARTITIONS] for n in range(len(places))]
    model = _letter(daemon)
    _write(
        daemon,
        (
            (
                "XADD",
                keys.dlq(*(first + places)[n % (2 * len(places))]),
                "*",
                *_dead_letter_fields(model, n, c),
            )
            for n in range(letters)
            for c in (min(int(chance.expovariate(0.15)), CAUSES - 1),)
        ),
    )


def _write(daemon: Daemon, commands: Iterator[tuple[Any, ...]]) -> None:
    some: list[tuple[Any, ...]] = []
    for each in commands:
        some.append(each)
        if len(some) == WRITE:
            daemon.link.pipeline(some)
            some = []
    daemon.link.pipeline(some)


def _letter(daemon: Daemon) -> dict[bytes, bytes]:
    """Return the fields of the dead letter that the daemon has written."""
    for number in range(PARTITIONS):
        for _, flat in daemon.link.execute("XRANGE", daemon.keys.dlq(TOPICS[0], number), "-", "+"):
            return dict(zip(flat[::2], flat[1::2], strict=True))
    raise AssertionError("no letter")


def _dead_letter_fields(model: dict[bytes, bytes], number: int, cause: int) -> list[bytes | str]:
    fields: dict[bytes, bytes | str] = model | {
        b"payload": BODY,
        b"errorClass": f"shop.errors.Cause{cause}",
        b"errorMessage": f"cause {cause} of number {number}",
        b"fingerprint": f"{cause:012x}",
        b"key": f"c-{number}",
    }
    return [each for pair in fields.items() for each in pair]


def paths(daemon: Daemon) -> dict[str, str]:
    """Return the paths of all views except jobs, and of forms and filters that examine much."""
    one = dead_letters.messages(daemon.store, TOPICS[0]).page(limit=1).rows[0].id
    message = tail.messages(daemon.store, TOPICS[0]).page(limit=1).rows[0]
    uid = f"{TOPICS[0]}/{message.partition}/{message.id}"
    shown = [each for each in VIEWS if "JOB" not in each.example]
    forms = [each for each in ACTS if each.name in ("replay", "purge")]
    found = {
        each.name: (each.example or each.path).replace("DEAD_LETTER", one).replace("UID", uid)
        for each in (*shown, *forms)
    }
    dead = f"/topics/{TOPICS[0]}/dead"
    return found | {
        "dead, one cause": f"{dead}?fingerprint={1:012x}",
        "dead, none matches": f"{dead}?error=Never",
        "replay, one cause": f"{dead}-replay?fingerprint={1:012x}",
        "purge, none matches": f"{dead}-purge?error=Never",
        "messages, none matches": f"/topics/{TOPICS[0]}/messages?where=payload+~+never",
    }


def started_job(context: Any, console: ConsoleProcess, path: str) -> str:
    """Replay one dead letter, and return the path of its job."""
    answer = context.request.post(
        f"{console.url}{path.lstrip('/')}-replay",
        form={"request-id": "once", "typed-name": TOPICS[0], "canary": "1"},
        headers={"Sec-Fetch-Site": "same-origin"},
        max_redirects=0,
    )
    assert answer.status == 303, answer.text()
    return urlsplit(answer.headers["location"]).path


def times(page: Any, url: str, daemon: Daemon) -> dict[str, Any]:
    """Open a page several times. Return its status, and its times in ms: first visit, medians.

    `commands` is the number of commands that the console sent to Redis during the most expensive
    visit. It includes those for a live page and for the snapshot that all pages share.
    """
    rows, commands = [], 0
    for _ in range(VISITS):
        began, first = time.monotonic(), commands_sent(daemon)
        answer = page.goto(url, timeout=60_000)
        page.wait_for_load_state()
        loaded = (time.monotonic() - began) * 1000
        commands = max(commands, commands_sent(daemon) - first)
        rows.append((page.evaluate(FIRST_BYTE), page.evaluate(FIRST_PAINT), loaded))
    names = ("first_byte_ms", "first_paint_ms", "loaded_ms")
    return {
        "status": answer.status,
        "commands": commands,
        "first_visit_first_paint_ms": round(rows[0][1]),
        **{
            name: round(statistics.median(row[at] for row in rows)) for at, name in enumerate(names)
        },
    }


def watch_slow(daemon: Daemon) -> None:
    """Forget the slow commands so far, and record those that take SLOW_MS from now on."""
    daemon.link.execute("CONFIG", "SET", "slowlog-log-slower-than", SLOW_MS * 1000)
    daemon.link.execute("SLOWLOG", "RESET")


def slow_commands(daemon: Daemon) -> list[tuple[float, str]]:
    """Return the slow commands of the console, each with its ms and its words."""
    rows = daemon.link.execute("SLOWLOG", "GET", 100)
    own = [row for row in rows if row[5] == b"streamqd:console"]
    return [(row[2] / 1000, " ".join(str(word)[:80] for word in row[3][:6])) for row in own]


def measure(daemon: Daemon, browser: Any) -> dict[str, Any]:
    """Open every view and 50 live pages. Return times, commands per event, and memory use."""
    with ConsoleProcess(daemon.config_path) as console:
        context = browser.new_context()
        page = context.new_page()
        page.goto(console.link)
        views = {}
        opened = paths(daemon)
        opened["job"] = started_job(context, console, opened["dead"])
        for name, path in opened.items():
            views[name] = times(page, console.url + path.lstrip("/"), daemon)
            print(f"{name}: {views[name]}", flush=True)
        cookie = "; ".join(f"{each['name']}={each['value']}" for each in context.cookies())
        context.close()
        one, fifty = (command_rates(daemon, console, cookie, ["/"] * pages) for pages in (1, 50))
        rss = psutil.Process(console.process.pid).memory_info().rss / 2**20
    print(f"{one} with 1 page, {fifty} with 50; RSS {rss:.0f} MiB")
    return {
        "views": views,
        "commands_per_event": {
            "1 page": round(one.per_event, 1),
            "50 pages": round(fifty.per_event, 1),
        },
        "cost_of_50_pages": round(fifty.ratio(one), 2),
        "rss_mib": round(rss),
        "slow_commands": slow_commands(daemon),
    }
