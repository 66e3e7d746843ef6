"""Shared parts of the command tests: fixture types, and reading a command's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

from tests.contract.harness import Harness

Run = Callable[..., Result]
HarnessAt = Callable[..., Harness]


def document(result: Result) -> Any:
    """Return the document that `--json` printed."""
    return json.loads(result.stdout)
