"""The producer of the soak, as a separate process that sends messages and records the outcomes.

    python -m tests.support.soak_producer CONFIG RATE SEED

Before each send, the ledger gets a record `planned`. It then gets `sent` (confirmed), `unknown`
(the reply was lost) or `refused` (Redis was unavailable, and nothing was written). SIGTERM stops
the producer.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from itertools import count
from pathlib import Path

from streamqd import config, process
from streamqd.errors import OutcomeUnknownError, RedisResponseError, RedisUnavailableError
from streamqd.producer import Producer
from tests.support.conservation import partition_for_number
from tests.support.ledger import Ledger

TOPIC = "orders"
ATTEMPTS_MAX = 3  # max_attempts of the consumers
REST_SECONDS = 0.05  # the pause after a failure

over = threading.Event()


def main(path: str, rate: str, seed: str) -> None:
    """Send messages until SIGTERM arrives."""
    process.die_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    chance = random.Random(f"producer {seed}")
    settings = config.load(Path(path))
    partitions = settings.topics[TOPIC].partitions
    ledger = Ledger.from_environment()
    with Producer(settings=settings, timeout=2.0) as producer:
        for number in count(1):
            if over.wait(chance.expovariate(float(rate))):
                return
            payload = f"{number} {work(chance)}"
            ledger.record_event("planned", payload)
            send(producer, ledger, chance, payload, partition_for_number(str(number), partitions))


def work(chance: random.Random) -> str:
    """Return a random instruction for the handler."""
    dice = chance.random()
    if dice < 0.90:
        return f"sleep {chance.choice((0, chance.uniform(0, 0.02), chance.uniform(0, 0.3))):.4f}"
    if dice < 0.97:
        return f"fail {chance.randrange(1, ATTEMPTS_MAX)}"
    return "dead" if dice < 0.985 else f"fail {ATTEMPTS_MAX}"


def send(
    producer: Producer, ledger: Ledger, chance: random.Random, payload: str, partition: int
) -> None:
    """Send a message in one of three ways, and record the outcome."""
    dice = chance.random()
    options: dict[str, object] = {}
    if dice < 0.2:
        options["dedup_id"] = payload.partition(" ")[0]
    elif dice < 0.3:
        options["delay"] = chance.uniform(0.1, 2.0)
    while True:
        try:
            found = producer.send(TOPIC, payload, partition=partition, **options)
        except (RedisUnavailableError, RedisResponseError) as error:
            if "dedup_id" in options and not over.wait(REST_SECONDS):
                continue  # with a dedup id, the message may be sent again any number of times
            unknown = "dedup_id" in options or isinstance(error, OutcomeUnknownError)
            ledger.record_event("unknown" if unknown else "refused", payload)
            over.wait(REST_SECONDS)
        else:
            delayed = "delay" in options
            ledger.record_sent("" if delayed else found, payload)
        return


if __name__ == "__main__":
    main(*sys.argv[1:])
