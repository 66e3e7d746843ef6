"""Source, sink, stream and SQL work through a Spark Connect server that the client starts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import Shop
from tests.support.spark_process import need_spark

CLIENT = """
import sys
from streamqd import spark as streamq
from pyspark.sql import SparkSession
url, folder = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert "connect" in type(spark).__module__
streamq.register(spark)
given = {"url": url, "topic": "orders", "startingOffsets": "earliest"}
rows = spark.range(10).selectExpr("string(id) AS key", "concat('row ', id) AS value")
rows.write.format("streamq").options(**given).mode("append").save()
print(streamq.read_topic(spark, "orders", url=url).where("partition = 0").count() < 10)
spark.sql(f"CREATE TABLE orders USING streamq OPTIONS (url '{url}', topic 'orders')").collect()
spark.sql("INSERT INTO orders (value) VALUES (binary('sql'))").collect()
print(spark.sql("SELECT count(*) FROM orders").collect()[0][0])
stream = spark.readStream.format("streamq").options(**given).load().select("key", "value")
query = (stream.writeStream.format("streamq").option("url", url).option("topic", "copy")
    .option("checkpointLocation", folder).trigger(availableNow=True).start())
query.awaitTermination()
spark.stop()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("grpc") is None,
    reason="grpcio is not installed: pip install 'pyspark[connect]'",
)
def test_spark_connect_reads_and_writes_topics(shop: Shop, tmp_path: Path) -> None:
    need_spark()
    shop.topic("orders", 2)
    shop.topic("copy", 1)

    command = [sys.executable, "-c", CLIENT, shop.server.url, str(tmp_path / "checkpoint")]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=240)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "11"]
    assert len(shop.payloads("copy", 1)) == 11
