"""Parts that the tests of commands share: fixture types, and a reader for JSON output."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

from tests.contract.harness import Harness

Run = Callable[..., Result]
HarnessAt = Callable[..., Harness]


def document(result: Result) -> Any:
    """Return the document that a command printed because of `--json`."""
    return json.loads(result.stdout)
