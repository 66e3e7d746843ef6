"""What lets Spark find `streamq` by itself: it looks into every importable module `pyspark_*`."""

from __future__ import annotations

from streamqd.spark.source import StreamqSource as DefaultSource

__all__ = ["DefaultSource"]
