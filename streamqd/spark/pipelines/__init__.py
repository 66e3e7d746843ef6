"""Pipelines on Spark: archive, compact, replay, sql, and custom jobs.

`streamqd pipeline` calls these. Each one takes a lease if two runs could collide, and returns its
result as a plain value. Importing this package requires pyarrow, and raises an error without it.
"""

from __future__ import annotations

from streamqd.spark import need

need("pyarrow")
