"""Parse keys from the bytes of a terminal, and apply them to the view, without any I/O."""

from __future__ import annotations

from dataclasses import replace

from streamqd.admin.ranking import ORDERS
from streamqd.cli.screen.frame import ScreenOptions

FILTER_MAX = 100
_NAMED = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[C": "page-down",
    b"\x1bOC": "page-down",
    b"\x1b[D": "page-up",
    b"\x1bOD": "page-up",
    b"\x1b[5~": "page-up",
    b"\x1b[6~": "page-down",
    b"\x1b[H": "home",
    b"\x1b[1~": "home",
    b"\x1bOH": "home",
    b"\x1b[F": "end",
    b"\x1b[4~": "end",
    b"\x1bOF": "end",
}


def keys(raw: bytes) -> tuple[list[str], bytes]:
    """Return the keys that the bytes from a terminal contain, and the bytes of an incomplete key.

    A single escape character at the end is incomplete. If no more bytes follow, pass it to `flush`.
    """
    found: list[str] = []
    while raw:
        if raw[:1] != b"\x1b":
            size = _size(raw[0])
            if len(raw) < size:
                break
            found.append(raw[:size].decode("utf-8", "replace"))
            raw = raw[size:]
            continue
        size = _sequence(raw)
        if not size:
            break
        name = _NAMED.get(raw[:size], "esc" if size == 1 else "")
        found += [name] if name else []
        raw = raw[size:]
    return found, raw


def flush(raw: bytes) -> list[str]:
    """Return the key that incomplete bytes stand for if no more bytes follow them.

    If they start with an escape character, this is the Esc key.
    """
    return ["esc"] if raw[:1] == b"\x1b" else []


def _size(first: int) -> int:
    """Return the number of bytes in the UTF-8 character that starts with this byte."""
    return 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _sequence(raw: bytes) -> int:
    """Return the length of the escape sequence at the start of `raw`, in bytes.

    Return 0 if the sequence is incomplete, and 1 if it is only the Esc key.
    """
    if len(raw) < 2:
        return 0
    if raw[1:2] == b"O":
        return 3 if len(raw) >= 3 else 0
    if raw[1:2] != b"[":
        return 1
    for at in range(2, min(len(raw), 16)):
        if 0x40 <= raw[at] <= 0x7E:
            return at + 1
    return 0 if len(raw) < 16 else 1


def handle_key(chosen: ScreenOptions, key: str, *, rows: int, room: int) -> ScreenOptions | None:
    """Return the view after a key, or None if the key quits.

    `rows` is the number of rows that match the filter, and `room` the number of rows that fit on
    the screen.
    """
    if chosen.typing:
        return _edit_filter(chosen, key)
    if chosen.help:
        return None if key == "q" else replace(chosen, help=False)
    last = max(0, rows - room)
    moves = {
        "up": chosen.top - 1,
        "k": chosen.top - 1,
        "down": chosen.top + 1,
        "j": chosen.top + 1,
        "page-up": chosen.top - room,
        "P": chosen.top - room,
        "page-down": chosen.top + room,
        # After the last page, the first one is shown again.
        "p": chosen.top + room if chosen.top < last else 0,
        "home": 0,
        "g": 0,
        "end": last,
        "G": last,
    }
    if key in moves:
        return replace(chosen, top=min(last, max(0, moves[key])))
    match key:
        case "q":
            return None
        case "s" | "S":
            step = 1 if key == "s" else -1
            order = ORDERS[(ORDERS.index(chosen.order) + step) % len(ORDERS)]
            return replace(chosen, order=order, reverse=False, top=0)
        case "r":
            return replace(chosen, reverse=not chosen.reverse, top=0)
        case "/":
            return replace(chosen, typing=True, top=0)
        case " ":
            return replace(chosen, frozen=not chosen.frozen)
        case "?" | "h":
            return replace(chosen, help=True)
        case "esc":
            return replace(chosen, filter="", top=0)
    return chosen


def _edit_filter(chosen: ScreenOptions, key: str) -> ScreenOptions:
    match key:
        case "\r" | "\n":
            return replace(chosen, typing=False)
        case "esc":
            return replace(chosen, typing=False, filter="")
        case "\x7f" | "\x08":
            return replace(chosen, filter=chosen.filter[:-1])
        case "\x15":
            return replace(chosen, filter="")
    if len(key) == 1 and key.isprintable() and len(chosen.filter) < FILTER_MAX:
        return replace(chosen, filter=chosen.filter + key, top=0)
    return chosen
