"""What Spark's tasks ask of the server: counting entries, and writing rows once.

Called by `streamqd.spark` only. Each function builds a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streamqd.errors import ContractError
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call

STEP_MAX = 500  # entries of one step
ROWS_MAX = 250  # rows of one call
FIELDS_MAX = 4000  # names and values of one row; Lua's `unpack` ends near 8,000


def step(stream: str, after: str, upto: str, count: int) -> Call:
    """Go `count` entries on from `after`, not beyond `upto`. Answers how many, and the last id."""
    if not 1 <= count <= STEP_MAX:
        raise ContractError(f"stream_step: {count} entries, not 1 to {STEP_MAX}")
    return scripts.get("stream_step").call({"stream": stream}, after=after, upto=upto, count=count)


class SinkRow(NamedTuple):
    """One row: the digest of itself and all before it, and its flat fields (name, value, …)."""

    digest: str
    fields: Sequence[bytes]


def append(
    keys: Keys,
    topic: str,
    partition: int,
    writer: str,
    batch: int,
    first: int,
    rows: Sequence[SinkRow],
) -> Call:
    """Write rows of a task, `first` being how many of it precede them on this partition."""
    if not 1 <= len(rows) <= ROWS_MAX:
        raise ContractError(f"sink_append: {len(rows)} rows, not 1 to {ROWS_MAX}")
    return scripts.get("sink_append").call(
        {"stream": keys.stream(topic, partition), "marker": keys.sink(topic, partition)},
        writer=writer,
        batch=batch,
        first=first,
        rows=[*_flat(rows)],
    )


def _flat(rows: Sequence[SinkRow]) -> Iterator[object]:
    for row in rows:
        if not row.fields or len(row.fields) % 2 or len(row.fields) > FIELDS_MAX:
            raise ContractError(f"a row of {len(row.fields)} names and values")
        yield row.digest
        yield len(row.fields)
        yield from row.fields


class Marker(NamedTuple):
    """What a writer has written to a partition: of which batch, how many rows, and their digest."""

    batch: int
    rows: int
    digest: str

    @classmethod
    def parse(
        cls, raw: bytes | None, key: str = "the markers of a partition", writer: str = "a writer"
    ) -> Marker | None:
        """Read a field of the marker; None when there is none. Raises BadValue."""
        if raw is None:
            return None
        batch, _, rest = raw.partition(b":")
        rows, _, digest = rest.partition(b":")
        return cls(
            untrusted.integer(batch, key, f"{writer}, batch"),
            untrusted.integer(rows, key, f"{writer}, rows"),
            untrusted.text(digest, key, f"{writer}, digest"),
        )
