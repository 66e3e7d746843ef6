"""A fleet with realistic names and problems: `python -m tests.support.sample_fleet`.

It has ten topics: some are calm, one has a handler that always fails, one has a handler that hangs,
one has a growing lag, one has a group that no instance serves, and some have texts that are long,
Chinese or hostile.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from streamqd import config
from streamqd.producer import Outgoing, Producer
from streamqd.store import topics
from tests.support import servers
from tests.support.console import ConsoleProcess
from tests.support.daemon import Daemon

LONG = "the quick brown fox jumps over the lazy dog and never comes back " * 20
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
CODE = """
import time
from streamqd import Dead, Message, Retry

class PaymentDeclined(Exception):
    pass

def calm(message: Message) -> None:
    pass

def slow(message: Message) -> None:
    time.sleep(0.5)

def hang(message: Message) -> None:
    time.sleep(3600)

def fail(message: Message) -> None:
    raise PaymentDeclined(f"支付被拒绝 (order {message.text()[:200]})")

def retry(message: Message) -> None:
    raise Retry(after=600)
"""
CONSUMERS = {
    ("orders", "billing"): "calm",
    ("orders", "shipping"): "calm",
    ("orders", "fraud-detection-with-a-rather-long-name"): "calm",
    ("payments", "ledger"): "fail",
    ("emails", "smtp"): "retry",
    ("clicks", "analytics"): "slow",
    ("images", "thumbnails"): "hang",
    ("invoices", "archive"): "calm",
    ("users", "crm-sync"): "calm",
    ("stock", "reservations"): "calm",
    ("notifications", "push"): "calm",
}
UNSERVED = ("reports", "nightly")


@contextlib.contextmanager
def scenario(folder: Path, redis_url: str) -> Iterator[Daemon]:
    """Run the fleet, with messages in all of its topics."""
    names = sorted({topic for topic, _ in CONSUMERS})
    daemon = Daemon(folder, redis_url, code=CODE, name="web-1")
    daemon.write_config(
        topics={name: {"partitions": 2} for name in names},
        consumers=[
            {
                "topic": topic,
                "group": group,
                "handler": f"work:{handler}",
                "max_attempts": 1 if handler == "fail" else 16,
            }
            for (topic, group), handler in CONSUMERS.items()
        ],
    )
    with contextlib.closing(daemon), daemon:
        topics.create(daemon.store, UNSERVED[0], config.Topic(partitions=2))
        for number in range(2):
            stream = daemon.keys.stream(UNSERVED[0], number)
            daemon.link.execute("XGROUP", "CREATE", stream, UNSERVED[1], "0", "MKSTREAM")
        feed(daemon, 200)
        yield daemon


def feed(daemon: Daemon, each: int) -> None:
    """Send messages to every topic."""
    with Producer(settings=config.load(daemon.config_path)) as producer:
        for topic in sorted({topic for topic, _ in CONSUMERS} | {UNSERVED[0]}):
            producer.send_many(topic, [_message(topic, number) for number in range(each)])


def _message(topic: str, number: int) -> Outgoing:
    texts = ["订单已创建请尽快发货", LONG, HOSTILE, "Grüße aus Köln", "9007199254740993"]
    text = texts[number % len(texts)]
    payload = {"id": number, "topic": topic, "note": text, "big": 2**53 + 1}
    return Outgoing(payload, key=f"customer-{number % 40}", headers={"note": text[:200]})


def main() -> None:
    """Run the fleet until Ctrl-C is pressed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("console", nargs="*", help="options of the console")
    options = parser.parse_args()
    server = servers.start("valkey")
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            scenario(Path(folder), server.url) as daemon,
            ConsoleProcess(daemon.config_path, *options.console) as console,
        ):
            print(console.first_line, flush=True)
            while not done.wait(1.0):
                feed(daemon, 5)
    finally:
        server.close()


if __name__ == "__main__":
    main()
