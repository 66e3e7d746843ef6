"""Pipelines on Spark: archive, compact, replay, sql, and custom jobs.

`streamqd pipeline` calls these functions. Each acquires a lease if two runs could conflict, and
returns its result as a plain value. Importing this package requires pyarrow.
"""

from __future__ import annotations

from streamqd.spark import need

need("pyarrow")
