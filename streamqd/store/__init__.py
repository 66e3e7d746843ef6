"""All communication with Redis. This package runs calls and reports refusals; callers decide."""

from __future__ import annotations
