"""Dead letters: listed, counted by cause, planned, replayed, purged, exported.

Each letter moves or vanishes in steps that are atomic and can be done again, so nothing happens to
it twice, even when others work on the same letters.
"""

from __future__ import annotations

from streamqd.admin.dead_letters.listing import (
    Causes,
    DeadLetterDetail,
    DeadLetterRow,
    FailureCause,
    LetterSurvey,
    TopicDeadLetters,
    causes,
    masked,
    messages,
    overview,
    show,
    survey,
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
from streamqd.admin.dead_letters.selection import (
    LetterCount,
    count,
    counted,
    stop_after,
    total,
)

__all__ = [
    "HOME",
    "MAX_REPLAYS",
    "Causes",
    "DeadLetterDetail",
    "DeadLetterRow",
    "Export",
    "Exported",
    "FailureCause",
    "LetterCount",
    "LetterSurvey",
    "Purged",
    "Receiver",
    "ReplayPlan",
    "ReplayResult",
    "Target",
    "TopicDeadLetters",
    "causes",
    "count",
    "counted",
    "masked",
    "messages",
    "overview",
    "plan",
    "purge",
    "replay",
    "show",
    "stop_after",
    "survey",
    "total",
]
