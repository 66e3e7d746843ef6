"""The Django app `streamqd`. It has a migration and no models."""

from __future__ import annotations

import contextlib

from django.apps import AppConfig


class StreamqdConfig(AppConfig):
    """The app for `INSTALLED_APPS`. Its migration creates the tables of the outbox."""

    name = "streamqd.django"
    label = "streamqd"
    verbose_name = "streamqd"

    def ready(self) -> None:
        """Register Django's check of the setting TASKS, which exists since Django 6.0."""
        with contextlib.suppress(ModuleNotFoundError):
            import django.tasks  # noqa: F401
