"""All Redis I/O. No decisions: a method carries out a value, or reports why it was refused."""

from __future__ import annotations
