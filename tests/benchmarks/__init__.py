"""Measurements, side by side in one run. Reported, never asserted."""

from __future__ import annotations
