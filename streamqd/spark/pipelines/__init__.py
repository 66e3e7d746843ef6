"""Spark pipelines: archive, compact, replay, sql, and custom jobs.

`streamqd pipeline` calls these functions. Each of them returns its result as a plain value. If two
runs could conflict, it first acquires a lease. pyarrow is required to import this package.
"""

from __future__ import annotations

from streamqd.spark import need

need("pyarrow")
