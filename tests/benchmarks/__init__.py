"""Measurements that alternate within one run. They are reported, never asserted."""

from __future__ import annotations
