"""All Redis I/O. It makes no decisions: a call is executed, or its refusal is returned."""

from __future__ import annotations
