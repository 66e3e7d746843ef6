"""The systemd units handle faults in which the service manager takes part."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from streamqd.config import Daemon

ROOT = Path(__file__).parents[2]
CONSOLE = "streamqd-console.service"  # forks no workers and owns no leases
UNITS = [each for each in sorted((ROOT / "systemd").glob("*.service")) if each.name != CONSOLE]


def settings(unit: Path) -> dict[str, list[str]]:
    """Return the values of each name, in the order in which the file has them."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in unit.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


every_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)


@pytest.mark.fault("F5")
@every_unit
def test_service_survives_an_oom_killed_worker(unit: Path) -> None:
    """The service survives if the kernel kills a worker because memory is short.

    With any other OOMPolicy, systemd would stop the service then.
    """
    assert settings(unit)["OOMPolicy"] == ["continue"]


@pytest.mark.fault("F31", "F37")
@every_unit
def test_systemd_signals_the_supervisor_and_kills_the_rest(unit: Path) -> None:
    found = settings(unit)
    assert (found["KillMode"], found["KillSignal"]) == (["mixed"], ["SIGTERM"])
    assert float(found["TimeoutStopSec"][0]) > Daemon().drain_timeout
    assert "SendSIGKILL" not in found
