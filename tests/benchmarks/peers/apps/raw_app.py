"""The limit of the machine: the bare loop without redis-py, on a blocking socket and hiredis.

Each process reads its own stream. For each batch, it sends XACK and XREADGROUP in one write, then
calls a plain function for each message. `python raw_app.py` runs two processes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from itertools import cycle
from typing import Any
from urllib.parse import urlsplit

import hiredis
import pair
import tally

STREAMS = ("raw:0", "raw:1")
COUNT = 256


class Link:
    """A connection. hiredis parses the replies and packs the commands."""

    def __init__(self) -> None:
        url = urlsplit(os.environ["BENCH_REDIS"])
        self.socket = socket.create_connection((str(url.hostname), int(url.port or 6379)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pending = object()  # a sentinel that is not a reply
        self.reader = hiredis.Reader(notEnoughData=self.pending)

    def ask(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Return the replies to commands that are sent in a single write."""
        self.socket.sendall(b"".join(map(hiredis.pack_command, commands)))
        replies: list[Any] = []
        while len(replies) < len(commands):
            reply = self.reader.gets()
            if reply is self.pending:
                self.reader.feed(self.socket.recv(65536))
            elif isinstance(reply, hiredis.HiredisError):
                raise reply
            else:
                replies.append(reply)
        return replies


def single(payloads: Iterable[str]) -> None:
    link = Link()
    for payload, stream in zip(payloads, cycle(STREAMS), strict=False):
        link.ask(("XADD", stream, "*", "payload", payload))


def bulk(payloads: list[str]) -> None:
    link = Link()
    for start in range(0, len(payloads), 500):
        stream = STREAMS[start // 500 % 2]
        many = payloads[start : start + 500]
        link.ask(*[("XADD", stream, "*", "payload", each) for each in many])


def work(stream: str) -> None:
    link = Link()
    try:
        link.ask(("XGROUP", "CREATE", stream, "g", "0", "MKSTREAM"))
    except hiredis.ReplyError as error:
        if "BUSYGROUP" not in str(error):
            raise
    read = ("XREADGROUP", "GROUP", "g", "w", "COUNT", COUNT)
    ids: list[bytes] = []
    while True:
        if ids:
            replies = link.ask(("XACK", stream, "g", *ids), (*read, "STREAMS", stream, ">"))
        else:
            replies = link.ask((*read, "BLOCK", 1000, "STREAMS", stream, ">"))
        entries = replies[-1][0][1] if replies[-1] else []
        ids = [entry[0] for entry in entries]
        for _, fields in entries:
            tally.done(fields[1])


if __name__ == "__main__":
    pair.run(work, STREAMS)
