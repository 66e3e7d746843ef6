"""Many workers start and exit under a storm of signals. tests/soak has the long version."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import hygiene
from tests.support.daemon import Daemon

RECYCLES = 100


@pytest.mark.fault("F33")
def test_recycles_during_many_signals_leak_nothing(
    new_daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Handlers that use threads, TLS and gRPC leave no deadlock, zombie or open file descriptor."""
    with hygiene.echo_peer(tmp_path / "peer") as peer:
        monkeypatch.setenv("PEER", peer)
        with new_daemon(**hygiene.daemon_options()) as daemon:
            storm = hygiene.Storm(daemon, seed=1)
            began = time.monotonic()
            storm.run(RECYCLES, every=0.2)
            rate = RECYCLES / (time.monotonic() - began)
            print(f"{', '.join(hygiene.clients())}: {rate:.1f} recycles/s, {storm.signals} signals")
            storm.judge()
            storm.wait_recycles(RECYCLES)
            assert daemon.stop() == 0
