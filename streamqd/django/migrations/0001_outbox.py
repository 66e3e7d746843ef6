"""Create the tables of the outbox."""

from __future__ import annotations

from django.db import migrations

from streamqd.django.operations import CreateOutbox


class Migration(migrations.Migration):
    """Creates the tables of the outbox, as `streamqd outbox create` does."""

    initial = True
    dependencies = []  # noqa: RUF012 - Django's form
    operations = [CreateOutbox()]  # noqa: RUF012
