"""The Spark steps of the README and of the archive tutorial work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages.reader import fences
from tests.pages.test_pages import ARCHIVE, README, TUTORIALS, make_reader
from tests.spark.conftest import Shop
from tests.support.spark_process import need_spark

ADDRESS = "redis://localhost:6379/0"
PATIENCE = 150.0  # seconds; Spark needs only a few on an idle machine


@pytest.mark.timeout(600)
def test_archive_tutorial_works_as_shown(state_dir: Path) -> None:
    need_spark()
    with make_reader(state_dir, PATIENCE) as reader:
        reader.work_through(TUTORIALS[ARCHIVE])

    assert reader.done > 10


def test_spark_example_of_the_readme_works(shop: Shop) -> None:
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 3)
    [snippet] = [fence.text for fence in fences(README) if "spark" in fence.words]

    assert ADDRESS in snippet
    found = eval(snippet.replace(ADDRESS, shop.server.url), {"spark": shop.spark})

    assert found.count() == 3
