"""Schedules: when a message is due, what becomes of ticks that were missed, and who declares them.

`ticks` computes due times, without Redis and without a clock. Other modules know neither cron nor
time zones. How a due tick becomes a message is the scripts' part, in one step each.
"""

from __future__ import annotations
