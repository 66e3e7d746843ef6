"""Take the pictures of the web console, light and dark: a part of `make docs NAME=shots`.

A daemon works on four topics, and most messages of one group fail. The previous hour is written
into the history, so that the console can draw trends.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from pathlib import Path

from streamqd import Producer, config
from streamqd.store import history
from streamqd.store.history import HistoryRow, Interval
from tests.support import servers
from tests.support.console import CHROMIUM, CHROMIUM_OPTIONS, ConsoleProcess
from tests.support.daemon import Daemon
from tests.support.waiting import wait_until

GROUPS = (
    ("orders", "billing", 40),
    ("orders", "search-index", 40),
    ("payments", "ledger", 24),
    ("emails", "mailer", 60),
    ("parcels", "tracking", 12),
)
CODE = """
import time

from streamqd import Dead


def handle(message):
    pass


def mail(message):
    time.sleep(0.02)


def post(message):
    if message.payload == b"declined":
        raise Dead("the bank declined the card")
    if message.payload == b"refused":
        raise ConnectionError("ledger.example.com:443 refused the connection")
"""
HANDLERS = {"ledger": "work:post", "mailer": "work:mail"}
MINUTE_MS = 60_000
MEASURED = {(topic, group): 4 for topic, group, _ in GROUPS}


def write_past_hour(daemon: Daemon) -> None:
    """Write the last hour of each group as a wave with some random variation."""
    chance, now = random.Random(1), time.time_ns() // 1_000_000
    key = daemon.store.keys.history("default")
    for minute in range(now // MINUTE_MS - 60, now // MINUTE_MS):
        rows = []
        for topic, group, rate in GROUPS:
            acked = round(rate * 60 * (1 + 0.4 * math.sin(minute / 9)) * chance.uniform(0.9, 1.1))
            counts = dict.fromkeys(history.COUNTS, 0) | {"added": acked, "acked": acked}
            row = HistoryRow(topic, group, None, "", counts, chance.randrange(40), 0, {12: acked})
            rows.append(row)
        history.append(
            *(daemon.store, "shots"),
            Interval("", "web-1", minute * MINUTE_MS, 60.0, rows, measured=MEASURED),
            86_400,
        )
        scratch = daemon.store.keys.history("shots")
        [[_, fields]] = daemon.store.execute("XRANGE", scratch, "-", "+")
        daemon.store.execute("DEL", scratch)
        daemon.store.execute("XADD", key, f"{minute * MINUTE_MS}-1", *fields)


def configure(daemon: Daemon) -> None:
    """Configure the daemon with the topics and groups."""
    topics = {topic: {"partitions": 4} for topic, _, _ in GROUPS}
    consumers = [
        {"topic": topic, "group": group, "handler": HANDLERS.get(group, "work:handle"),
         "max_attempts": 2, "backoff": {"base": "1s"}}
        for topic, group, _ in GROUPS
    ]  # fmt: skip
    daemon.write_config(topics=topics, consumers=consumers)


def send(producer: Producer) -> None:
    """Send some messages to each topic. Most of the payments fail."""
    payments = ["paid", "refused", "refused", "declined"]
    for topic in dict.fromkeys(topic for topic, _, _ in GROUPS):
        for number in range(20):
            payload = payments[number % len(payments)] if topic == "payments" else "ok"
            producer.send(topic, payload, key=f"customer-{number}")


def shoot(url: str, producer: Producer, images: Path) -> None:
    """Take the overview in both color schemes, once its figures are there, and the dead letters."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        state = None
        for scheme in ("light", "dark"):
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": 1280, "height": 800}, storage_state=state
            )
            page = context.new_page()
            page.goto(url if state is None else url.partition("?")[0])
            page.wait_for_selector("#pulse[data-state=live]")
            for _ in range(24 if state is None else 4):
                send(producer)
                page.wait_for_timeout(500)
            page.screenshot(path=images / f"console-{scheme}.png")
            if scheme == "light":
                page.goto(f"{url.partition('?')[0]}topics/payments/dead?since=1h")
                page.screenshot(path=images / "console-dead-letters.png")
            state = context.storage_state()
            context.close()
        browser.close()


def main(images: Path) -> None:
    """Write console-light.png, console-dark.png and console-dead-letters.png."""
    if not CHROMIUM.exists():
        print("skipped, chromium is not installed: console-*.png")
        return
    if (second := time.time() % 60) > 20:  # so that the trends contain no minute of this run
        time.sleep(60 - second)
    server = servers.start("valkey", tcp=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            daemon = Daemon(Path(folder), server.url, name="web-1", code=CODE)
            configure(daemon)
            write_past_hour(daemon)
            with (
                daemon,
                ConsoleProcess(daemon.config_path) as console,
                Producer(settings=config.load(daemon.config_path)) as producer,
            ):
                send(producer)
                wait_until(lambda: daemon.events("message.dead_lettered"), timeout=30)
                shoot(console.link, producer, images)
    finally:
        server.close()
