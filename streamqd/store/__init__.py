"""All communication with Redis.

This package runs calls and reports refusals. Its callers decide how to react to them.
"""

from __future__ import annotations
