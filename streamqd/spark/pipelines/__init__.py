"""Pipelines on Spark: archive, compact, replay, sql, and jobs of one's own.

Called by `streamqd pipeline`. Each takes a lease where two runs could meet, and returns what it did
as a plain value. Importing this needs pyarrow, and says so.
"""

from __future__ import annotations

from streamqd.spark import need

need("pyarrow")
