"""`streamqd doctor`: facts are gathered once, then every check judges them. Nothing is written.

declaration.py   what a check is                facts.py   what is known
*_facts.py       the looking, area by area      reading.py that goes on where it is refused
server, rights, topics, partitions, delays, letters, values, leases, fleet, host: the checks
"""

from __future__ import annotations

from streamqd.admin.diagnosis.declaration import Check, Need, Severity
from streamqd.admin.diagnosis.examination import (
    CHECKS,
    DiagnosisFinding,
    DiagnosisReport,
    chosen,
    examine,
    without_redis,
)

__all__ = [
    "CHECKS",
    "Check",
    "DiagnosisFinding",
    "DiagnosisReport",
    "Need",
    "Severity",
    "chosen",
    "examine",
    "without_redis",
]
