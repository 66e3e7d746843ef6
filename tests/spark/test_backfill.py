"""A streaming query that starts in an archive reads each entry once, over restarts and growth."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from streamqd.spark.pipelines.storage import Archive
from tests.spark.conftest import Shop

pytest.importorskip("deltalake")

from tests.support.backfill_trial import BackfillTrial


def test_stream_continues_from_its_archive(shop: Shop, tmp_path: Path) -> None:
    """A stream reads its archive and then Redis, as in a small `make soak NAME=backfill`."""
    home = tmp_path / "rows"
    home.mkdir()
    folder = str(tmp_path / "archive")
    trial = BackfillTrial(shop.spark, shop.server, shop.keys, folder, home, 2000, random.Random(1))
    found = trial.run(stops=2)
    assert (found.rows, found.missing, found.repeated) == (4000, 0, 0), asdict(found)
    assert found.archived == 2000
    assert found.stops == 2


def test_stream_continues_from_a_bucket(
    shop: Shop, tmp_path: Path, event_log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stream reads from a bucket, whose credentials appear in no plan and in no event log."""
    pytest.importorskip("moto")
    from tests.support.s3 import KEY, SECRET, BucketServer

    home = tmp_path / "rows"
    home.mkdir()
    with BucketServer() as store:
        trial = BackfillTrial(
            *(shop.spark, shop.server, shop.keys, "s3://bucket/archive", home, 300),
            random.Random(1),
            store.options,
        )
        found = trial.run(stops=1)
    assert (found.rows, found.missing, found.repeated) == (600, 0, 0), asdict(found)
    shown = capfd.readouterr()
    logs = [each.read_text() for each in event_log.rglob("*") if each.is_file()]
    assert any("SparkListenerJobStart" in each for each in logs)
    for text in (shown.out, shown.err, *logs):
        assert SECRET not in text
        assert KEY not in text


def test_batch_read_with_an_archive_is_refused(shop: Shop, tmp_path: Path) -> None:
    Archive(tmp_path, create=True)
    shop.topic("access", 1)
    with pytest.raises(PySparkException, match="archivePath applies only to streams; read"):
        shop.read("access", archivePath=tmp_path).count()
