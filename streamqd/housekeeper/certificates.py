"""Looks when the certificates on the way to Redis end, so that it is logged before they do."""

from __future__ import annotations

import logging
import time

from streamqd import logs
from streamqd.config import Settings
from streamqd.errors import RedisUnavailable
from streamqd.metrics import MetricsView
from streamqd.store import certificates
from streamqd.store.client import connect

LINK_TIMEOUT = 5.0
AGAIN_SECONDS = 60.0  # until the next look where a node did not answer


class CertificateWatch:
    """Shown as a metric; logged once for each certificate, and again when it has ended."""

    def __init__(self, settings: Settings, view: MetricsView) -> None:
        self._settings = settings.redis
        self._view = view
        self._logged: set[str] = set()

    @property
    def wanted(self) -> bool:
        """Whether there are any: the way to Redis is encrypted."""
        return self._settings.url.startswith("rediss")

    def run(self) -> float | None:
        """Look at them by a connection of its own: those that are open keep what they began with.

        A node that does not answer is looked at sooner. That a new connection is refused says
        nothing of those that are open.
        """
        found: dict[str, float] = {}
        silent = False
        link = connect(self._settings, timeout=LINK_TIMEOUT, name="streamqd:certificates")
        try:
            for node in link.masters():
                try:
                    found |= certificates.ends_of(node)
                except RedisUnavailable:
                    silent = True
        except RedisUnavailable:
            silent = True
        finally:
            link.close()
        if silent:
            found = {**self._view.certificates, **found}  # what was known of it
        self._view.certificates = found
        texts = certificates.warnings(found, time.time())
        for text in texts:
            if text not in self._logged:
                logs.event("tls.expiring", logging.WARNING, about=text)
        self._logged = set(texts)
        return AGAIN_SECONDS if silent else None
