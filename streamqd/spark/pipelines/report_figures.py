"""What a report makes of what was counted: bucket widths, balance, advice, safe text. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from streamqd.policy.partitioning import crc32_partition

BUCKETS_MAX = 96  # bars of one plot
TEXT_MAX = 200  # characters that are shown of a text from a message
PERCENTILES = (0.5, 0.9, 0.99)

_SECOND, _HOUR, _DAY = 1000, 3_600_000, 86_400_000
_WIDTHS = (
    *(_SECOND * n for n in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 7, 28)),
)
_YEAR = 364 * _DAY  # whole weeks
# A fullest partition up to this many times the mean is what chance does.
_EVEN = 1.2
# More partitions help when the fullest then holds at most this part of what it holds now.
_RELIEF = 0.7
_MOST = 0.9  # part of all rows that is as good as all


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly partitions are filled: the fullest over the mean, 1 = even, None = empty."""

    rows: float | None
    size: float | None
    fullest: int | None  # number of the partition with the most rows
    share: float | None  # of all rows, in the fullest


# --- time -----------------------------------------------------------------------------------------


def bucket_ms(first_ms: int, last_ms: int, most: int = BUCKETS_MAX) -> int:
    """The smallest round width of buckets, in milliseconds, that needs at most `most` of them."""
    for width in _WIDTHS:
        if last_ms // width - first_ms // width < most:
            return width
    years = 1
    while last_ms // (years * _YEAR) - first_ms // (years * _YEAR) >= most:
        years *= 2
    return years * _YEAR


def filled(
    counts: Mapping[int, tuple[int, int]], width: int, first_ms: int, last_ms: int
) -> list[tuple[int, int, int]]:
    """Start in unix ms, rows and bytes of every bucket, those without entries too."""
    start = first_ms // width * width
    return [(at, *counts.get(at, (0, 0))) for at in range(start, last_ms + 1, width)]


def hours(marks: Iterable[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """Counts by hour (start in unix ms, number) as columns of a plot: their width, all of them.

    Hours are put together where there would be too many.
    """
    held = dict(marks)
    first, last = min(held), max(held)
    width = max(_HOUR, bucket_ms(first, last))
    folded: dict[int, tuple[int, int]] = {}
    for at, number in held.items():
        start = at // width * width
        folded[start] = (folded.get(start, (0, 0))[0] + number, 0)
    return width, [(at, number) for at, number, _ in filled(folded, width, first, last)]


def iso(unix_ms: int | None) -> str | None:
    """A time in unix ms as the document has it; None for one that no calendar has."""
    if unix_ms is None:
        return None
    try:
        at = dt.datetime.fromtimestamp(unix_ms / 1000, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unix_ms(stamp: str) -> int:
    """What `iso` was made of."""
    return round(dt.datetime.fromisoformat(stamp).timestamp() * 1000)


# --- balance --------------------------------------------------------------------------------------


def balance(rows: Sequence[int], sizes: Sequence[int]) -> Balance:
    """The balance of partitions, given the rows and bytes of each, the empty ones too."""
    total = sum(rows)
    if not total:
        return Balance(None, None, None, None)
    most = max(rows)
    return Balance(
        rows=most * len(rows) / total,
        size=max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else None,
        fullest=list(rows).index(most),
        share=most / total,
    )


def foreseen(total: int, heavy: Iterable[tuple[bytes, int]], partitions: int) -> float:
    """Share of all rows that the fullest of `partitions` would hold.

    `heavy` are the keys with the most rows; each goes where its hash says, the rest evenly.
    """
    held = [0] * partitions
    for key, rows in heavy:
        held[crc32_partition(key, partitions)] += rows
    rest = total - sum(held)
    return (max(held) + rest / partitions) / total


def advice(rows: Sequence[int], heavy: Sequence[tuple[bytes, int]], keys: int) -> str:
    """One sentence: whether more partitions would help, and why.

    `rows` of each partition, `heavy` the keys with the most rows, those first, of about `keys`
    different ones. Growth is judged by doubling.
    """
    total, count = sum(rows), len(rows)
    now = balance(rows, rows)
    if now.rows is None or now.share is None:
        return "No entries, so nothing can be said about the number of partitions."
    more = 2 * count
    by_hash, then = foreseen(total, heavy, count), foreseen(total, heavy, more)
    hottest = heavy[0][1] / total if heavy else 0.0
    state = _state(count, now.share, now.rows)
    if now.rows > _EVEN and by_hash <= _RELIEF * now.share:
        return (
            f"{state}, where the hash of the keys would give {percent(by_hash)}: the topic has"
            " grown, or producers choose partitions by themselves; more partitions alone would not"
            " help."
        )
    if then <= _RELIEF * now.share:
        limit = f"; one key alone holds {percent(hottest)}" if hottest >= then / 2 else ""
        return (
            f"{state}; more partitions would help where handlers cannot keep up: of {more} the"
            f" fullest would hold about {percent(then)}{limit}."
        )
    if hottest >= then / 2:
        return (
            f"{state}; more partitions would not help, because one key holds {percent(hottest)} of"
            " the entries and a key never leaves its partition: divide that key."
        )
    if sum(each for _, each in heavy) >= _MOST * total:
        return (
            f"{state}; more partitions would not help much, because there are only about"
            f" {keys:,} keys to spread: choose finer keys."
        )
    return (
        f"{state}; more partitions would not help much: of {more} the fullest would still hold"
        f" about {percent(then)}."
    )


def _state(count: int, share: float, ratio: float) -> str:
    if count == 1:
        return "There is one partition"
    if ratio <= _EVEN:
        return f"The {count} partitions are even, the fullest holds {percent(share)}"
    return (
        f"The fullest of {count} partitions holds {percent(share)} of the entries, {ratio:.1f}"
        " times the mean"
    )


# --- text -----------------------------------------------------------------------------------------


def safe_text(raw: object, most: int = TEXT_MAX) -> str:
    """Text of anybody's, on one line, cut, and without characters that could harm a reader.

    Control characters and those that turn the direction of writing are escaped; bytes that are no
    text too.
    """
    if raw is None:
        return ""
    if isinstance(raw, bytes | bytearray):
        text = bytes(raw[: 4 * most + 4]).decode("utf-8", "backslashreplace")
    else:
        text = str(raw)[: most + 1]
    shown = "".join(each if each.isprintable() else _escaped(each) for each in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def percent(share: float) -> str:
    """`41 %`, `0.3 %`, `under 0.1 %`."""
    number = 100 * share
    if 0 < number < 0.1:
        return "under 0.1 %"
    return f"{number:.1f} %" if number < 9.95 and number != round(number) else f"{number:.0f} %"


def duration(milliseconds: float | None) -> str:
    """`12 ms`, `4.2 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`; `no data` for None."""
    if milliseconds is None:
        return "no data"
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    if milliseconds < 59_950:
        return f"{milliseconds / 1000:.{1 if milliseconds % 1000 else 0}f} s"
    whole = round(milliseconds / 1000)
    for size, unit, lower, name in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // lower
            return f"{whole // size:,} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole} s"


def size(number: float | None) -> str:
    """Bytes as `312 B`, `4.2 KiB`, `1.5 GiB`."""
    if number is None:
        return "no data"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")
