"""The job of RQ, which its workers import by name."""

from __future__ import annotations

import tally


def job(payload: str) -> None:
    tally.done(payload)
