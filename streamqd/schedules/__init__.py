"""Declare schedules, compute their due times, and send their messages.

`ticks` computes due times without Redis and without a clock. It is the only module that deals with
cron expressions and time zones. A script turns each due tick into a message in one step.
"""

from __future__ import annotations
