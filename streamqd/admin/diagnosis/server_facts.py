"""What the server says of itself: INFO, some settings, its slow log, its clock, its distance."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from streamqd.admin.diagnosis.facts import ServerHealth, SlowCommand
from streamqd.admin.diagnosis.reading import TolerantReader, named
from streamqd.store import scripts
from streamqd.store.certificates import ends_of
from streamqd.store.keys import Keys

PINGS = 5  # of which the middle one is the distance of the server
SLOW_MAX = 128  # entries of the slow log
_SETTINGS = ("appendfsync", "maxclients", "proto-max-bulk-len", "timeout")


def gather(reader: TolerantReader, keys: Keys) -> ServerHealth:
    """Ask the server."""
    asked = [("CONFIG", "GET", name) for name in _SETTINGS]
    info, slow, *settings = reader.ask([("INFO",), ("SLOWLOG", "GET", SLOW_MAX), *asked])
    stated: dict[str, str] = {}
    for flat in settings:
        stated |= {name: value.decode() for name, value in named(flat or ()).items()}
    return ServerHealth(
        info=_info(info or b""),
        config=stated,
        round_trip_ms=_round_trip_ms(reader),
        skew_seconds=_skew_seconds(reader),
        slow=_slow(slow or (), keys),
        certificates=ends_of(reader.link),
    )


def _info(raw: bytes) -> Mapping[str, str]:
    lines = raw.decode("utf-8", "replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _round_trip_ms(reader: TolerantReader) -> float | None:
    """The time that the middle one of some commands takes: a single one may have bad luck."""
    taken = []
    for _ in range(PINGS):
        begun = time.perf_counter()
        if reader.ask([("TIME",)]) == [None]:
            return None
        taken.append((time.perf_counter() - begun) * 1000)
    return round(statistics.median(taken), 3)


def _skew_seconds(reader: TolerantReader) -> float | None:
    before = time.time()
    (reply,) = reader.ask([("TIME",)])
    if reply is None:
        return None
    # The server looked at its clock somewhere between; nobody knows where.
    middle = (before + time.time()) / 2
    return round(int(reply[0]) + int(reply[1]) / 1e6 - middle, 3)


def _slow(entries: Sequence[Any], keys: Keys) -> list[SlowCommand]:
    names = {script.sha.encode(): script.name for script in scripts.load().values()}
    ours = (f"{keys.control}:".encode(), f"{keys.streams}:".encode())
    found = []
    for _, at, micros, arguments, *_ in entries:
        key = next((each for each in arguments[1:] if each.startswith(ours)), None)
        if key is None:
            continue
        name = arguments[0].decode("utf-8", "replace").upper()
        if name == "EVALSHA":
            name = f"the script {names.get(arguments[1], 'with the digest ' + repr(arguments[1]))}"
        found.append(SlowCommand(at, micros / 1000, name, key.decode("utf-8", "replace")))
    return found
