"""What is done with dead letters: planned, replayed, purged, exported.

Each letter moves or vanishes in steps that are atomic and can be done again, so nothing happens to
it twice, whoever else is at work on the same letters.
"""

from __future__ import annotations

from streamqd.admin.dead_causes import Causes, FailureCause, causes
from streamqd.admin.dead_choice import EVERY_LETTER, DeadLetterFilter, count
from streamqd.admin.dead_export import Export, Exported
from streamqd.admin.dead_plan import Receiver, ReplayPlan, plan
from streamqd.admin.dead_purge import Purged, purge
from streamqd.admin.dead_replay import MAX_REPLAYS, ReplayResult, replay
from streamqd.admin.dead_target import HOME, Target

__all__ = [
    "EVERY_LETTER",
    "HOME",
    "MAX_REPLAYS",
    "Causes",
    "DeadLetterFilter",
    "Export",
    "Exported",
    "FailureCause",
    "Purged",
    "Receiver",
    "ReplayPlan",
    "ReplayResult",
    "Target",
    "causes",
    "count",
    "plan",
    "purge",
    "replay",
]
