"""The limit: redis-py with our access pattern, but without fence, blame, retries or metrics.

Each process reads its own stream. For each batch, it makes one pipelined round trip with XACK and
XREADGROUP, and then calls a plain function for each message. `python bare_app.py` runs two
processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import cycle

import pair
import redis
import tally

STREAMS = ("bare:0", "bare:1")
COUNT = 256


def client() -> redis.Redis:
    return redis.Redis.from_url(os.environ["BENCH_REDIS"], protocol=2)


def single(payloads: Iterable[str]) -> None:
    connection = client()
    for payload, stream in zip(payloads, cycle(STREAMS), strict=False):
        connection.execute_command("XADD", stream, "*", "payload", payload)


def bulk(payloads: list[str]) -> None:
    connection = client()
    for start in range(0, len(payloads), 500):
        pipe = connection.pipeline(transaction=False)
        for payload in payloads[start : start + 500]:
            pipe.execute_command("XADD", STREAMS[start // 500 % 2], "*", "payload", payload)
        pipe.execute()


def work(stream: str) -> None:
    connection = client()
    try:
        connection.xgroup_create(stream, "g", id="0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
    read = ("XREADGROUP", "GROUP", "g", "w", "COUNT", COUNT)
    ids: list[bytes] = []
    while True:
        pipe = connection.pipeline(transaction=False)
        if ids:
            pipe.execute_command("XACK", stream, "g", *ids)
            pipe.execute_command(*read, "STREAMS", stream, ">")
        else:
            pipe.execute_command(*read, "BLOCK", 1000, "STREAMS", stream, ">")
        found = pipe.execute()[-1]
        entries = found[0][1] if found else []
        ids = [entry[0] for entry in entries]
        for _, fields in entries:
            tally.done(fields[b"payload"] if isinstance(fields, dict) else fields[1])


if __name__ == "__main__":
    pair.run(work, STREAMS)
