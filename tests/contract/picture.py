"""The keyspace of one partition as plain values, which are read from a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.contract.harness import Harness

Fields = dict[str, bytes]


@dataclass
class Group:
    """The data of one group. Places are `m:<id>` and `r:<id>`."""

    token: str = ""
    epoch: int = 0
    session: str = ""
    mark: str = ""
    quarantine: bool = False
    accused: list[str] = field(default_factory=list)
    lease: str = ""
    last_main: str = "0-0"
    last_retry: str = "0-0"
    pending: dict[str, str] = field(default_factory=dict)  # place -> consumer
    retry: dict[str, Fields] = field(default_factory=dict)  # the retry stream
    delayed: dict[str, Fields] = field(default_factory=dict)  # place -> fields
    attempts: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Picture:
    """The whole keyspace of the partition."""

    stream: dict[str, Fields]
    dlq: dict[str, Fields]
    groups: dict[str, Group]


def observe(harnesses: dict[str, Harness]) -> Picture:
    """Read the keyspace of the partition. Fails if it contains an unknown key."""
    first = next(iter(harnesses.values()))
    commands: list[tuple[Any, ...]] = [
        ("XRANGE", first.stream, "-", "+"),
        ("XRANGE", first.dlq, "-", "+"),
        ("XINFO", "GROUPS", first.stream),
        ("KEYS", "*"),
    ]
    known = {first.stream, first.dlq, first.trim}
    for name, harness in harnesses.items():
        known |= {
            harness.fence,
            harness.lease,
            harness.retry,
            harness.delayed,
            harness.items,
            harness.attempts,
            harness.epochs,  # no script decides by it: see `test_owner_changes.py`
        }
        commands += [
            ("HGETALL", harness.fence),
            ("GET", harness.lease),
            ("XPENDING", harness.stream, name, "-", "+", 10_000),
            ("XPENDING", harness.retry, name, "-", "+", 10_000),
            ("XRANGE", harness.retry, "-", "+"),
            ("XINFO", "GROUPS", harness.retry),
            ("ZRANGE", harness.delayed, 0, -1),
            ("HGETALL", harness.items),
            ("HGETALL", harness.attempts),
        ]
    replies = first.link.pipeline(commands)
    stream, letters, groups, keys = replies[:4]
    assert {key.decode() for key in keys} <= known
    last = {pair_fields(flat)["name"].decode(): pair_fields(flat) for flat in groups}
    picture = Picture(_entries(stream), _entries(letters), {})
    for fields in picture.dlq.values():
        fields.pop("failedAt")
    for at, name in enumerate(harnesses):
        picture.groups[name] = _group(last[name], replies[4 + 9 * at : 13 + 9 * at])
    return picture


def _group(info: Fields, replies: list[Any]) -> Group:
    fence, lease, main, retried, retry, retry_groups, delayed, items, attempts = replies
    held = {name: value.decode() for name, value in pair_fields(fence).items()}
    pending = {f"m:{row[0].decode()}": row[1].decode() for row in main}
    pending |= {f"r:{row[0].decode()}": row[1].decode() for row in retried}
    packed = pair_fields(items)
    assert {place.decode() for place in delayed} == set(packed)
    return Group(
        token=held.get("token", ""),
        epoch=int(held.get("epoch", 0)),
        session=held.get("session", ""),
        mark=held.get("mark", ""),
        quarantine="quarantine" in held,
        accused=held.get("accused", "").split(),
        lease=(lease or b"").decode(),
        last_main=info["last-delivered-id"].decode(),
        last_retry=pair_fields(retry_groups[0])["last-delivered-id"].decode(),
        pending=pending,
        retry=_entries(retry),
        delayed={place: unpack_fields(value) for place, value in packed.items()},
        attempts=pair_fields(attempts),
    )


def _entries(rows: list[Any]) -> dict[str, Fields]:
    return {entry_id.decode(): pair_fields(fields) for entry_id, fields in rows}


def order(entry_id: str) -> tuple[int, int]:
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq)


def find_payloads(picture: Picture, bodies: dict[str, Fields], name: str) -> dict[bytes, list[str]]:
    """Return the places of each payload in a group, as far as the picture alone shows them."""
    group = picture.groups[name]
    found: dict[bytes, list[str]] = {}

    def add(payload: bytes, place: str) -> None:
        found.setdefault(payload, []).append(place)

    for entry_id, fields in picture.stream.items():
        if order(entry_id) > order(group.last_main):
            add(fields["payload"], "unread")
    for entry_id, fields in group.retry.items():
        if order(entry_id) > order(group.last_retry):
            add(fields["payload"], "retry unread")
    for place in group.pending:
        body = bodies if place[0] == "m" else group.retry
        add(body[place[2:]]["payload"], "pending" if place[0] == "m" else "retry pending")
    for fields in group.delayed.values():
        add(fields["payload"], "delayed")
    for fields in picture.dlq.values():
        if fields["group"].decode() == name:
            add(fields["payload"], "dead")
    return found


def unpack_fields(packed: bytes) -> Fields:
    """Decode an array of byte strings that cmsgpack has written."""
    first, at = packed[0], 1
    if first & 0xF0 == 0x90:
        count = first & 0x0F
    else:
        assert first == 0xDC
        count, at = int.from_bytes(packed[1:3]), 3
    parts: list[bytes] = []
    for _ in range(count):
        head = packed[at]
        if head & 0xE0 == 0xA0:
            size, at = head & 0x1F, at + 1
        else:
            width = {0xD9: 1, 0xDA: 2, 0xDB: 4}[head]
            size, at = int.from_bytes(packed[at + 1 : at + 1 + width]), at + 1 + width
        parts.append(packed[at : at + size])
        at += size
    assert at == len(packed)
    return pair_fields(parts)


def pair_fields(flat: list[Any]) -> Fields:
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
