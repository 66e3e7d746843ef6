"""Read the state of this instance's outboxes from Redis, for its metrics.

The relays of the outboxes publish their state there, even if they run on other hosts. The databases
themselves are not read.
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
    """Read the states of all outboxes into the view, in one round trip.

    An outbox whose state is invalid is left out and reported to `bad`. Raises RedisResponseError if
    Redis refuses to read an outbox, after the states of the others were recorded.
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
