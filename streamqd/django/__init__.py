"""streamqd in Django: the app with the outbox's tables, and sends in Django's own transactions.

`sending` sends messages with the settings of the project, and `connections` takes care of database
connections in handlers. `tasks` is the backend for `django.tasks`, and `worker` runs its tasks in
the daemon. Both need Django 6.0, and are imported only if the settings name them. `operations` and
`migrations` create the tables.

The package is an app for `INSTALLED_APPS`. It has no models, so it may be imported at any time.
"""

from __future__ import annotations

from streamqd.django.connections import fresh_connections
from streamqd.django.sending import outbox, producer, send

__all__ = ["fresh_connections", "outbox", "producer", "send"]
