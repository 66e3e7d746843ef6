"""Schedules: due times of messages, handling of missed ticks, and the owners of declarations.

`ticks` computes due times, without Redis and without a clock. Only it deals with cron and time
zones. The scripts turn a due tick into a message, in one step each.
"""

from __future__ import annotations
