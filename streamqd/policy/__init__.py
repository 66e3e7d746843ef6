"""Decisions that depend only on their arguments.

The modules of this package use no Redis, no clock, no random numbers, no operating system and no
logging. The same arguments therefore always give the same decision.
"""

from __future__ import annotations
