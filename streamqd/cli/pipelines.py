"""`streamqd pipeline`, with all its verbs."""

from __future__ import annotations

from streamqd.cli.pipeline import pipeline
from streamqd.cli.report import report
from streamqd.cli.sql import sql

__all__ = ["pipeline"]

pipeline.add_command(report)
pipeline.add_command(sql)
