"""Spark pipelines: archive, compact, replay, sql, and custom jobs.

`streamqd pipeline` calls the functions of these modules, and each function returns its result as a
plain value. A function first acquires a lease if two runs of it could conflict. pyarrow is required
to import this package.
"""

from __future__ import annotations

from streamqd.spark import need

need("pyarrow")
