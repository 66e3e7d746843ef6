"""Schedules: due times of messages, missed ticks, and the owners of declarations.

`ticks` computes due times, without Redis and without a clock. No other module deals with cron and
time zones. Scripts turn each due tick into a message in one step.
"""

from __future__ import annotations
