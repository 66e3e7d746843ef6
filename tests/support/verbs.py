"""Shared parts of the command tests: fixture types, and reading a command's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

from tests.contract.desk import Desk

Run = Callable[..., Result]
At = Callable[..., Desk]


def document(result: Result) -> Any:
    """Return the document that `--json` printed."""
    return json.loads(result.stdout)
