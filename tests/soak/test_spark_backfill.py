"""A stream that reads its archive first, while entries are written, archived and trimmed.

ROWS entries are archived before it starts, and ROWS are written while it runs. It is stopped ten
times, and has each entry once. Skipped unless ROWS is set: `make soak NAME=backfill`. SEED repeats
the random choices. RESULT names the result file.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import secrets
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("deltalake")

from tests.spark.conftest import Shop, event_log, shop, spark  # noqa: F401
from tests.support.backfill_trial import BackfillTrial
from tests.support.machine import machine

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif("ROWS" not in os.environ, reason="a soak test: `make soak NAME=backfill`"),
]

ROWS = int(os.environ.get("ROWS") or "500000")
SEED = int(os.environ.get("SEED") or secrets.randbelow(1 << 32))
STOPS = 10


@pytest.fixture(autouse=True)
def no_thread_is_left() -> None:
    """Skip the check for threads: the session always has some, and no test forks."""


def test_backfill_has_each_entry_once(shop: Shop, tmp_path: Path) -> None:  # noqa: F811
    home = tmp_path / "rows"
    home.mkdir()
    folder = str(tmp_path / "archive")
    trial = BackfillTrial(
        shop.spark, shop.server, shop.keys, folder, home, ROWS, random.Random(SEED)
    )
    found = asdict(trial.run(STOPS))
    result = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "seed": SEED,
        **found,
        "machine": machine(),
    }
    if name := os.environ.get("RESULT"):
        Path(name).write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(json.dumps(result, indent=2))
    assert (found["rows"], found["missing"], found["repeated"]) == (2 * ROWS, 0, 0)
    assert (found["archived"], found["live"]) == (ROWS, ROWS)
