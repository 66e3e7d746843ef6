"""Fixtures of the contract tests."""

from __future__ import annotations

import pytest

from streamqd.store.client import Link
from streamqd.store.keys import Keys
from tests.contract.desk import Desk


@pytest.fixture
def desk(link: Link, keys: Keys) -> Desk:
    """One unit on an empty server."""
    return Desk(link, keys)
