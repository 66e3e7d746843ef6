"""Everything that the parts of one worker share."""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.config import Consumer, Settings
from streamqd.message import Delivery
from streamqd.model import Unit
from streamqd.scoreboard import WorkerSlot
from streamqd.worker.control_channel import ControlChannel
from streamqd.worker.run_counts import RunCounts
from streamqd.worker.server_clock import ServerClock
from streamqd.worker.settler import Settler
from streamqd.worker.soft_limit import SoftLimit


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One worker's unit, its settings, and the objects of which it has one each."""

    settings: Settings
    consumer: Consumer
    delivery: Delivery
    slot: WorkerSlot
    channel: ControlChannel
    settler: Settler
    clock: ServerClock
    counts: RunCounts
    limit: SoftLimit

    @property
    def unit(self) -> Unit:
        """The assignment: topic, partition and group."""
        return self.delivery.unit
