"""Pipelines on Spark: archive, compact, replay, sql, and jobs of one's own.

Called by `streamqd pipeline`. Each takes a lease where two runs could meet, and returns what it did
as a plain value.
"""

from __future__ import annotations
