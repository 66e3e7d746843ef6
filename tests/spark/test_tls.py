"""Spark tasks use topics over TLS with client certificates, and the secrets stay hidden."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from streamqd.spark import offsets
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from tests.spark.conftest import Shop, run
from tests.support import tls
from tests.support.servers import ProcessServer, require

# The server is started by fork, and Python warns of that if a session has left threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

USER, PASSWORD = "spark", "not-for-anybody-to-see"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return require(tls.certificates, tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls_server(certificates: Path) -> Iterator[ProcessServer]:
    """Run a server that requires TLS, a client certificate and a password."""
    made = require(tls.start, certificates)
    yield made
    made.close()


def test_tasks_use_tls_and_reveal_no_secret(
    spark: object,
    tls_server: ProcessServer,
    certificates: Path,
    event_log: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    link = connect(tls_server.settings, timeout=10.0, name="test")  # through its socket
    shop = Shop(spark, tls_server, link, Keys())  # type: ignore[arg-type]
    link.execute("ACL", "SETUSER", USER, "on", f">{PASSWORD}", "~*", "&*", "+@all")
    link.execute("ACL", "SETUSER", "default", "-@all", "+ping", "+acl")
    (tmp_path / "password").write_text(PASSWORD)
    (tmp_path / "password").chmod(0o600)
    host = f"127.0.0.1:{tls_server.port}"
    files = {
        "caFile": certificates / "ca.pem",
        "certFile": certificates / "server.pem",
        "keyFile": certificates / "server.key",
    }
    in_url = {"url": f"rediss://{USER}:{PASSWORD}@{host}", **files}
    in_file = {"url": f"rediss://{host}", "username": USER, **files}
    in_file["passwordFile"] = tmp_path / "password"

    rows = shop.spark.sql("SELECT cast(id AS string) AS value FROM range(40)")
    to_access = shop.write_options(topic="access", partitions=2, **in_url)
    rows.write.format("streamq").options(**to_access).mode("append").save()
    read = shop.read("access", **in_url)
    assert read.count() == 40
    read.explain(extended=True)

    to_copy = shop.write_options(topic="copy", partitions=2, **in_file)
    writer = shop.stream("access", **in_url).select("value").writeStream.format("streamq")
    checkpoint = tmp_path / "checkpoint"
    query = (
        writer.options(**to_copy)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    run(query)
    query.explain(extended=True)
    assert shop.read("copy", **in_file).count() == 40

    for wrong, text in (
        ({"caFile": certificates / "other.pem"}, "CERTIFICATE_VERIFY_FAILED"),
        ({"certFile": "", "keyFile": ""}, "rediss|no reply|cannot|certificate"),
        ({"url": f"rediss://{USER}:{PASSWORD}x@{host}"}, "WRONGPASS|password"),
    ):
        with pytest.raises(PySparkException, match=text) as caught:
            shop.read("access", **(in_url | wrong), retries=0).count()
        assert PASSWORD not in str(caught.value)
    link.close()

    seen = "".join(capfd.readouterr())
    seen += "".join(
        path.read_text(errors="replace") for path in checkpoint.rglob("*[!c]") if path.is_file()
    )
    seen += "".join(
        path.read_text(errors="replace") for path in event_log.rglob("*") if path.is_file()
    )
    # The search proves something only if the files have their expected content.
    assert "BatchScan streamq" in seen
    assert "SparkListenerSQLExecutionStart" in seen
    assert offsets.COUNTS in seen
    assert PASSWORD not in seen
