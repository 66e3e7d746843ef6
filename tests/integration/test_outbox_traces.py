"""A message that is sent through an outbox carries its send's trace context in its headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from streamqd.outbox.database import connect
from streamqd.outbox.schema import create
from tests.support.collector import collecting

SENDER = """
import sqlite3, sys
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from streamqd import Outbox

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
connection = sqlite3.connect(sys.argv[1])
print(Outbox(traces=True).send(connection, "orders", b"x", headers={"mine": "1"}))
connection.commit()
"""


def test_outbox_row_has_the_context_of_its_span(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with connect(f"sqlite:///{path}", create=True) as database, collecting() as collector:
        create(database)
        environment = os.environ | collector.environment
        command = [sys.executable, "-c", SENDER, str(path)]
        uid = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True).strip()
        [span] = collector.wait(1, messaging__message__id=uid)
        [row] = database.read_oldest(10)
    assert span.kind == "producer"
    headers = json.loads(row.headers or b"")
    assert headers["mine"] == "1"
    assert headers["traceparent"].startswith(f"00-{span.trace_id}-{span.span_id}-")
