"""A minimal script, for tests of the code that runs scripts."""

from __future__ import annotations

from pathlib import Path

from streamqd.store import scripts
from streamqd.store.scripts import Call

TEXT = """\
-- writer: nothing -> a value
--
-- KEYS[1]  target  STRING  any
--
-- ARGV[1]  value  str  what to set
--
-- Returns  OK  set
--
-- Cost     O(1)
-- Repeat   safe
local target = KEYS[1]
local value = ARGV[1]
redis.call('SET', target, value)
return {'OK', value}
"""


def writer(key: str, value: str, *, name: str = "writer", command: str = "SET") -> Call:
    """Set a key. Another `name` makes another script. With the `command` HGET, the script fails."""
    text = TEXT.replace("writer", name).replace("'SET'", f"'{command}'")
    return scripts.parse(name, text, Path()).call({"target": key}, value=value)
