"""The ways in which a worker calls a handler, as settings of a consumer.

The test's module `work` defines the handlers `plain`, `slow` and `coroutine`.
"""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "one by one": {"handler": "work:plain"},
    "coroutine": {"handler": "work:coroutine"},
    "threads": {"handler": "work:slow", "concurrency": 4},
    "coroutines": {"handler": "work:coroutine", "concurrency": 4},
    "coroutines with a limit": {"handler": "work:coroutine", "concurrency": 4, "timeout": "30s"},
}
