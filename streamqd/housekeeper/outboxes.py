"""Read the figures for the metrics that the relays of this instance's outboxes publish.

The relays may run on other hosts. The databases themselves are not read.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamqd.errors import InvalidValueError
from streamqd.housekeeper.batch import Refusals
from streamqd.logs import Once
from streamqd.metrics.view import MetricsView
from streamqd.store import outbox
from streamqd.store.outbox import OutboxView
from streamqd.store.store import Store


def measure_outboxes(store: Store, view: MetricsView, names: Sequence[str], bad: Once) -> None:
    """Read the figures of all outboxes into the view, in one round trip.

    An outbox whose state is invalid gets no figures. If Redis refuses to read an outbox,
    RedisResponseError is raised after the figures of the others are recorded.
    """
    if not names:
        return
    refusals, found, wrong = Refusals(), [], []
    for each in outbox.read_views(store, names):
        if isinstance(each, OutboxView):
            found.append(each)
        elif isinstance(each, InvalidValueError):
            wrong.append(each)
        else:
            refusals.accept(each)
    view.outboxes = tuple(found)
    bad.report_values(wrong)
    refusals.raise_first()
