"""Pure decisions: no Redis, clock, random, os, logging. Same arguments, same answer."""

from __future__ import annotations
