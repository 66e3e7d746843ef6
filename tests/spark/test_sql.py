"""SQL over topics: catalog tables, views and INSERT INTO work without a visible password."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.spark.conftest import Shop


@pytest.fixture(autouse=True)
def tidy(spark: SparkSession) -> None:
    for each in spark.catalog.listTables():
        kind = "VIEW" if each.isTemporary else "TABLE"
        spark.sql(f"DROP {kind} {each.name}")


def table(shop: Shop, name: str, **options: object) -> None:
    given = ", ".join(f"{each} '{value}'" for each, value in shop.write_options(**options).items())
    shop.spark.sql(f"CREATE TABLE {name} USING streamq OPTIONS ({given})")


def error_line(shop: Shop, statement: str) -> str:
    """Return the last line of the error that a statement raises."""
    with pytest.raises(PySparkException) as caught:
        shop.spark.sql(statement).collect()
    return str(caught.value).strip()


def test_sql_reads_and_writes_a_table(shop: Shop) -> None:
    shop.topic("orders", 2)
    table(shop, "orders", topic="orders", includeHeaders=True)

    shop.spark.sql(
        "INSERT INTO orders (key, value, headers)"
        " SELECT binary(string(id)), binary(concat('row ', id)),"
        " array(named_struct('key', 'tenant', 'value', binary('blue'))) FROM range(20)"
    )
    shop.spark.sql("INSERT INTO orders (value) VALUES (binary('without a key'))")
    shop.spark.sql("INSERT INTO orders BY NAME SELECT binary('by name') AS value, 1 AS partition")

    found = shop.spark.sql(
        "SELECT string(key), string(value), topic, partition, headers FROM orders"
    ).collect()
    assert len(found) == 22
    rows = {row.value: row for row in found}
    assert rows["row 7"].key == "7"
    assert [tuple(each) for each in rows["row 7"].headers] == [("tenant", bytearray(b"blue"))]
    assert rows["without a key"].key is None
    assert rows["by name"].partition == 1
    assert {row.topic for row in found} == {"orders"}


def test_sql_copies_rows_between_tables(shop: Shop) -> None:
    """All streamq tables have the same columns, but inserted rows are not taken for the table."""
    shop.topic("here", 2)
    shop.topic("there", 2)
    shop.fill("here", 0, 1, 5)
    shop.fill("here", 1, 6, 9)
    table(shop, "a", topic="here")
    table(shop, "b", topic="there")
    before = shop.payloads("here", 2)

    shop.spark.sql("INSERT INTO b SELECT * FROM a")
    assert shop.payloads("there", 2) == before
    shop.spark.table("a").writeTo("b").append()
    assert shop.payloads("there", 2) == sorted(before * 2)
    assert shop.payloads("here", 2) == before

    assert "name the columns" in error_line(shop, "INSERT INTO b SELECT * FROM b")
    frame = shop.spark.table("a")
    with pytest.raises(PySparkException, match="name the columns"):
        frame.write.format("streamq").mode("append").save()
    to_there = shop.write_options(topic="there")
    frame.write.format("streamq").options(**to_there).mode("append").save()
    assert shop.payloads("there", 2) == sorted(before * 3)
    assert shop.payloads("here", 2) == before


def test_sql_reads_and_writes_a_view(shop: Shop) -> None:
    shop.topic("orders", 1)
    shop.spark.sql(
        "CREATE TEMPORARY VIEW orders USING streamq"
        f" OPTIONS (url '{shop.server.url}', topic 'orders')"
    )
    shop.spark.sql("INSERT INTO orders (value) VALUES (binary('one'))")
    shop.spark.sql("CREATE TEMPORARY VIEW texts AS SELECT string(value) AS text FROM orders")

    assert shop.spark.sql("SELECT text FROM texts").collect() == [("one",)]


def test_sql_table_can_be_streamed(shop: Shop, tmp_path: Path) -> None:
    shop.topic("orders", 1)
    shop.fill("orders", 0, 1, 4)
    table(shop, "orders", topic="orders", startingOffsets="earliest")

    batches = shop.take(shop.spark.readStream.table("orders").select("id"), tmp_path)

    assert batches == [[("1-0",), ("2-0",), ("3-0",), ("4-0",)]]


def test_invalid_statement_is_one_sentence(shop: Shop) -> None:
    shop.topic("orders", 1)
    table(shop, "orders", topic="orders")
    of = f"OPTIONS (url '{shop.server.url}', topic 'orders')"
    create = "CREATE TABLE bad USING streamq"

    for statement, sentence in (
        (f"{create} OPTIONS (url 'http://x', topic 'a')", "not a Redis URL"),
        (f"{create} OPTIONS (url '{shop.server.url}', topc 'a')", "did you mean topic?"),
        (f"{create} OPTIONS (url '{shop.server.url}')", "set exactly one of subscribe"),
        (f"{create} OPTIONS (url 'redis://h', topic '../a')", "not a valid topic name"),
        (f"{create} {of} LOCATION '/tmp/x'", "use `subscribe` to read"),
        (f"{create} {of} AS SELECT binary('x') AS value", "the options are missing"),
        ("INSERT OVERWRITE orders (value) VALUES (binary('x'))", "cannot be overwritten"),
        ("CREATE TABLE bad USING streamq", "set exactly one of subscribe"),
    ):
        assert sentence in error_line(shop, statement), statement
    shop.spark.sql(f"CREATE TABLE columns (value BINARY) USING streamq {of}")
    assert "the options are missing" in error_line(shop, "SELECT * FROM columns")
    assert "the options are missing" in error_line(shop, "INSERT INTO columns VALUES (binary('x'))")
    assert shop.payloads("orders", 1) == []


CATALOG = """
import sys
from streamqd import spark as streamq
folder, url, step = sys.argv[1:]
spark = streamq.session("catalog", "local[1]", {
    "spark.sql.catalogImplementation": "hive",
    "spark.sql.warehouse.dir": folder + "/warehouse",
    "spark.driver.extraJavaOptions": f"-Dderby.system.home={folder} -XX:TieredStopAtLevel=1",
})
if step == "make":
    spark.sql(f"CREATE TABLE orders USING streamq OPTIONS (url '{url}', topic 'orders')")
    spark.sql("INSERT INTO orders (value) VALUES (binary('first'))")
else:
    spark.sql("INSERT INTO orders (value) VALUES (binary('second'))")
    print([row[0] for row in spark.sql("SELECT string(value) FROM orders ORDER BY id").collect()])
"""


def test_other_session_finds_a_table_in_its_catalog(shop: Shop, tmp_path: Path) -> None:
    shop.topic("orders", 1)

    def script(step: str) -> str:
        command = [sys.executable, "-c", CATALOG, str(tmp_path), shop.server.url, step]
        done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    script("make")
    assert script("find") == "['first', 'second']\n"


PASSWORD = "hunter-two"
WATCHED = """
import sys, urllib.request
from streamqd import spark as streamq
folder, url = sys.argv[1:]
spark = streamq.session("watched", "local[1]", {
    "spark.ui.enabled": "true", "spark.ui.port": "0",
    "spark.eventLog.enabled": "true", "spark.eventLog.compress": "false",
    "spark.eventLog.dir": f"file://{folder}",
})
spark.sparkContext.setLogLevel("INFO")
given = {"url": url, "topic": "orders"}
rows = spark.sql("SELECT binary('x') AS value")
rows.write.format("streamq").options(**given).mode("append").save()
frame = spark.read.format("streamq").options(**given).load()
assert frame.count() == 1
frame.explain(extended=True)
frame.createOrReplaceTempView("made")
spark.sql(f"CREATE TEMPORARY VIEW told USING streamq OPTIONS (url '{url}', topic 'orders')")
spark.sql("INSERT INTO told (value) VALUES (binary('y'))")
assert spark.sql("SELECT count(*) FROM told JOIN made USING (id)").collect() == [(2,)]
spark.sql("EXPLAIN EXTENDED SELECT * FROM told").show(truncate=False)
stream = spark.readStream.format("streamq").options(**given, startingOffsets="earliest").load()
query = (stream.select("value").writeStream.format("streamq").option("url", url)
    .option("topic", "copy").option("partitions", 1)
    .option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start())
query.awaitTermination()
query.explain(extended=True)
print(query.recentProgress)
base, app = spark.sparkContext.uiWebUrl, spark.sparkContext.applicationId
api = f"/api/v1/applications/{app}"
pages = [f"{api}/{name}" for name in ("jobs", "stages", "environment", "executors")]
pages += [f"{api}/sql?details=true&planDescription=true&length=1000"]
pages += ["/SQL/", "/jobs/", "/stages/", "/environment/", "/StreamingQuery/"]
number = spark._jsparkSession.sharedState().statusStore().executionsCount()
pages += [f"/SQL/execution/?id={each}" for each in range(number)]
for page in pages:
    print(page, urllib.request.urlopen(base + page).read().decode())
spark.stop()
"""


def test_password_in_a_table_url_is_never_shown(shop: Shop, tmp_path: Path) -> None:
    shop.topic("orders", 1)
    url = shop.server.url.replace("unix://", f"unix://watched:{PASSWORD}@")
    shop.link.execute("ACL", "SETUSER", "watched", "on", f">{PASSWORD}", "~*", "&*", "+@all")
    try:
        command = [sys.executable, "-c", WATCHED, str(tmp_path), url]
        done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=240)
    finally:
        shop.link.execute("ACL", "DELUSER", "watched")

    assert done.returncode == 0, done.stderr
    assert "/SQL/execution/?id=5" in done.stdout
    assert "BatchScan streamq" in done.stdout
    assert PASSWORD not in done.stdout + done.stderr
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert {"events_1", "offsets"} <= {each.name[:8] for each in files} | {
        each.parent.name for each in files
    }
    assert [each for each in files if PASSWORD.encode() in each.read_bytes()] == []


@pytest.mark.parametrize("clause", ["OPTIONS", "TBLPROPERTIES"])
def test_table_refuses_a_password_option(shop: Shop, clause: str) -> None:
    answer = error_line(
        shop,
        f"CREATE TABLE bad USING streamq {clause}"
        f" (url 'redis://user:{PASSWORD}@localhost', topic 'orders')",
    )

    assert all(way in answer for way in ("passwordFile", "$STREAMQ_URL", "streamq.toml"))
    assert PASSWORD not in answer
    assert not shop.spark.catalog.tableExists("bad")
