"""Decisions that depend only on their arguments.

The modules of this package do not access Redis, a clock, random numbers, the operating system or
the log. The same arguments therefore always give the same decision.
"""

from __future__ import annotations
