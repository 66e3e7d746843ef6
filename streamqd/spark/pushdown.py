"""Convert the filters that Spark offers to the partitions and ID ranges to read.

Spark applies each filter itself unless the source claims the filter. The source therefore claims
only filters that it applies exactly, and uses others only to read less. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from streamqd.model import TopicPartition
from streamqd.spark import offsets
from streamqd.spark.offsets import Id, Span

_LAST: Id = (offsets.PART_MAX, offsets.PART_MAX)


class PushedFilters:
    """The partitions and the ID range `(low, high]` with rows that can pass the filters."""

    def __init__(self) -> None:
        self.low: Id = offsets.ZERO
        self.high: Id = _LAST
        self._allowed: list[tuple[int, frozenset[Any]]] = []

    def push(self, filters: Iterable[Any]) -> list[Any]:
        """Use as many filters as possible.

        Return the filters that Spark must still apply itself.
        """
        return [each for each in filters if not self._take_filter(each)]

    def may_match(self, place: TopicPartition) -> bool:
        """Return True if rows of this partition can pass the filters."""
        return all(place[at] in values for at, values in self._allowed)

    def spans(self, spans: Iterable[Span]) -> list[Span]:
        """Return the parts of the spans whose entries can pass the filters."""
        kept = [each for each in spans if self.may_match(each.place)]
        return offsets.narrow(kept, self.low, self.high)

    def _take_filter(self, one: Any) -> bool:
        """Narrow the read by a filter if possible.

        Return True only if the source applies it exactly.
        """
        attribute: tuple[str, ...] = getattr(one, "attribute", ())
        column = attribute[0].lower() if len(attribute) == 1 else ""
        value: Any = getattr(one, "value", None)
        kind = type(one).__name__
        if column in ("topic", "partition") and kind in ("EqualTo", "In"):
            values = frozenset({value} if kind == "EqualTo" else value)
            self._allowed.append((("topic", "partition").index(column), values))
            return True
        if column == "id_ms" and isinstance(value, int) and value >= 0:
            self._bound(kind, value, value)
        if column == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
            micros = round(value.timestamp() * 1_000_000)
            if micros >= 0:
                # IDs contain whole milliseconds. A bound between two milliseconds is therefore
                # rounded both down and up, so that entries of both milliseconds are read, and Spark
                # checks them.
                self._bound(kind, micros // 1000, -(-micros // 1000))
        return False

    def _bound(self, kind: str, floor_ms: int, ceiling_ms: int) -> None:
        if kind in ("GreaterThan", "GreaterThanOrEqual", "EqualTo"):
            self.low = max(self.low, offsets.before_time(floor_ms))
        if kind in ("LessThan", "LessThanOrEqual", "EqualTo"):
            self.high = min(self.high, (ceiling_ms, offsets.PART_MAX))
