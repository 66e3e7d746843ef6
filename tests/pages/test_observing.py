"""The pages about OpenTelemetry and Sentry name only variables and attributes that exist."""

from __future__ import annotations

import re
from pathlib import Path

from streamqd import telemetry
from streamqd.logs import EVENTS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs" / "how-to" / name for name in ("trace-messages.md", "report-errors-to-sentry.md")
]
SOURCES = "".join(path.read_text() for path in sorted(Path(telemetry.__file__).parent.glob("*.py")))


def test_documented_attributes_are_set_by_the_code() -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"`(streamqd\.[a-z_.]+)[`= ]", text))
    assert named
    assert {name for name in named if f'"{name}"' not in SOURCES} == set()


def test_every_span_attribute_is_documented() -> None:
    text = "".join(page.read_text() for page in PAGES)
    set_by_code = set(re.findall(r'"(streamqd\.[a-z_.]+)"', SOURCES))
    assert {name for name in set_by_code if f"`{name}" not in text} == set()


def test_telemetry_events_are_documented() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert {name for name in EVENTS if name.startswith("telemetry.") and name not in text} == set()
