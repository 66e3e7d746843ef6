"""streamqd: two partitions, with other settings at their defaults. Runs per job or per batch."""

from __future__ import annotations

import os
from collections.abc import Iterable

import tally

from streamqd import Message, Producer


def job(message: Message) -> None:
    tally.done(message.payload)


def jobs(messages: list[Message]) -> None:
    tally.done_all(len(messages), (each.payload for each in messages))


def single(payloads: Iterable[str]) -> None:
    with Producer(os.environ["BENCH_REDIS"]) as producer:
        for payload in payloads:
            producer.send("bench", payload)


def bulk(payloads: list[str]) -> None:
    with Producer(os.environ["BENCH_REDIS"]) as producer:
        producer.send_many("bench", payloads)
