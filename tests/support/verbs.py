"""What tests of verbs share: the names of their fixtures' types, and reading a verb's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

from tests.contract.desk import Desk

Run = Callable[..., Result]
At = Callable[..., Desk]


def document(result: Result) -> Any:
    """Return what `--json` has printed."""
    return json.loads(result.stdout)
