"""List, count, replay, purge and export the dead letters of a topic.

Each step of a replay or a purge is atomic and can be repeated. Even if several clients replay the
same dead letters at the same time, none is replayed twice.
"""

from __future__ import annotations

from streamqd.admin.dead_letters.listing import (
    Causes,
    DeadLetterDetail,
    DeadLetterRow,
    DeadLetterSurvey,
    FailureCause,
    TopicDeadLetters,
    causes,
    mask_dead_letter,
    messages,
    overview,
    show,
    survey,
)
from streamqd.admin.dead_letters.passes import Export, Exported, Purged, purge
from streamqd.admin.dead_letters.replay import (
    DEFAULT_TARGET,
    MAX_REPLAYS,
    Receiver,
    ReplayPlan,
    ReplayResult,
    Target,
    plan,
    replay,
)
from streamqd.admin.dead_letters.selection import (
    MatchCount,
    count,
    count_within,
    stop_after,
    total,
)

__all__ = [
    "DEFAULT_TARGET",
    "MAX_REPLAYS",
    "Causes",
    "DeadLetterDetail",
    "DeadLetterRow",
    "DeadLetterSurvey",
    "Export",
    "Exported",
    "FailureCause",
    "MatchCount",
    "Purged",
    "Receiver",
    "ReplayPlan",
    "ReplayResult",
    "Target",
    "TopicDeadLetters",
    "causes",
    "count",
    "count_within",
    "mask_dead_letter",
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
