"""Looks when the certificates on the way to Redis end, so that it is told before they do."""

from __future__ import annotations

import logging
import time

from streamqd import logs
from streamqd.config import Settings
from streamqd.metrics import View
from streamqd.store import certificates
from streamqd.store.cluster import connect

LINK_TIMEOUT = 5.0


class Expiry:
    """Shown as a metric; told once in the log for each certificate, and again when it has ended."""

    def __init__(self, settings: Settings, view: View) -> None:
        self._settings = settings.redis
        self._view = view
        self._told: set[str] = set()

    @property
    def wanted(self) -> bool:
        """Whether there are any: the way to Redis is encrypted."""
        return self._settings.url.startswith("rediss")

    def run(self) -> None:
        """Look at them by a connection of its own: those that are open keep what they began with.

        Raises RedisUnavailable.
        """
        link = connect(self._settings, timeout=LINK_TIMEOUT, name="streamqd:certificates")
        try:
            found: dict[str, float] = {}
            for node in link.masters():
                found |= certificates.ends_of(node)
        finally:
            link.close()
        self._view.certificates = found
        texts = certificates.warnings(found, time.time())
        for text in texts:
            if text not in self._told:
                logs.event("tls.expiring", logging.WARNING, about=text)
        self._told = set(texts)
