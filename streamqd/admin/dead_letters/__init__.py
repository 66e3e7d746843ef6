"""Dead letters: listed, counted by cause, planned, replayed, purged, exported.

Each letter moves or vanishes in steps that are atomic and can be done again, so nothing happens to
it twice, even when others work on the same letters.
"""

from __future__ import annotations

from streamqd.admin.dead_letters.listing import (
    Causes,
    DeadLetterDetail,
    DeadLetterRow,
    DeadLettersView,
    FailureCause,
    TopicDeadLetters,
    causes,
    listed,
    masked,
    overview,
    show,
)
from streamqd.admin.dead_letters.passes import Export, Exported, Purged, purge
from streamqd.admin.dead_letters.replay import (
    HOME,
    MAX_REPLAYS,
    Receiver,
    ReplayPlan,
    ReplayResult,
    Target,
    plan,
    replay,
)
from streamqd.admin.dead_letters.selection import EVERY_LETTER, DeadLetterFilter, count, total

__all__ = [
    "EVERY_LETTER",
    "HOME",
    "MAX_REPLAYS",
    "Causes",
    "DeadLetterDetail",
    "DeadLetterFilter",
    "DeadLetterRow",
    "DeadLettersView",
    "Export",
    "Exported",
    "FailureCause",
    "Purged",
    "Receiver",
    "ReplayPlan",
    "ReplayResult",
    "Target",
    "TopicDeadLetters",
    "causes",
    "count",
    "listed",
    "masked",
    "overview",
    "plan",
    "purge",
    "replay",
    "show",
    "total",
]
