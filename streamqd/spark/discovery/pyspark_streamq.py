"""Let Spark find `streamq` automatically. Spark imports every module named `pyspark_*`."""

from __future__ import annotations

from streamqd.spark.source import StreamqSource as DefaultSource

__all__ = ["DefaultSource"]
