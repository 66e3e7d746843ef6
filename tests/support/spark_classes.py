"""`python -m tests.support.spark_classes HOME`: make a folder for SPARK_HOME that starts faster.

Half of a session's start is spent by Java on reading and checking the same classes each time. If
Java is given the archive HOME/classes.jsa, it maps them into memory instead. Java ignores an
archive that belongs to another version of Java or Spark.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from streamqd import spark
from tests.support.spark_process import link_spark


def main(home: Path) -> None:
    """Link Spark into a folder, and run a session whose Java writes the archive when it exits."""
    link_spark(home)
    os.environ["SPARK_HOME"] = str(home)
    target = home / "classes.jsa"
    # The archive is written under another name first, because a concurrent test must not read a
    # part of it.
    part = target.with_suffix(".part")
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{options} -XX:ArchiveClassesAtExit={part}"
    session = spark.session("classes", "local[1]")
    gateway = session.sparkContext._gateway
    with tempfile.TemporaryDirectory() as folder:
        rows = session.range(100).selectExpr("id", "id % 3 AS third", "string(id) AS name")
        rows.write.parquet(f"{folder}/rows")
        session.read.parquet(f"{folder}/rows").groupBy("third").count().collect()
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(300)
    part.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
