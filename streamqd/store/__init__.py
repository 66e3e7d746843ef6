"""All Redis I/O. No decisions: a method carries a value out, or says why it was refused."""

from __future__ import annotations
