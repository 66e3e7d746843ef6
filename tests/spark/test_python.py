"""A script runs in the Python of a virtual environment while another Python is on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import Shop

SCRIPT = """
import sys
if sys.argv[2] == "early":
    import streamqd.spark
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
from streamqd import spark as streamq
try:
    print(streamq.read_topic(spark, "orders", url=sys.argv[1]).count())
except streamq.SparkMissingError as error:
    print(error)
"""


@pytest.mark.parametrize(("moment", "printed"), [("early", "3\n"), ("late", "PYSPARK_PYTHON=")])
def test_workers_use_the_driver_python_or_report_why_not(
    shop: Shop, tmp_path: Path, moment: str, printed: str
) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("this Python is of no virtual environment")
    shop.topic("orders", 1)
    shop.fill("orders", 0, 1, 3)
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    # Without SPARK_HOME, the workers import PySpark from the package, as after `pip install`.
    ours = ("PYSPARK_PYTHON", "SPARK_HOME")
    plain = {name: value for name, value in os.environ.items() if name not in ours}
    plain["PATH"] = f"{tmp_path}:{plain['PATH']}"

    command = [sys.executable, "-c", SCRIPT, shop.server.url, moment]
    done = subprocess.run(command, env=plain, text=True, capture_output=True, timeout=200)

    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
