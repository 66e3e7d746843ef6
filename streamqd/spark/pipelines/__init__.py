"""Pipelines on Spark: archive, compact, replay, sql, and custom jobs.

`streamqd pipeline` calls these. Each takes a lease where two runs could collide, and returns its
result as a plain value. Importing this needs pyarrow, and a missing one raises an error.
"""

from __future__ import annotations

from streamqd.spark import need

need("pyarrow")
