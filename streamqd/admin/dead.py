"""The former name of `streamqd.admin.dead_letters`."""

from __future__ import annotations

from streamqd.admin.dead_letters import *  # noqa: F403
