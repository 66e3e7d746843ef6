"""All Redis I/O. This package makes no decisions: it executes calls and returns refusals."""

from __future__ import annotations
