"""Tests: unit, contract, integration, acceptance. What they share is in `support`."""
