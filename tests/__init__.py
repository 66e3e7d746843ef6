"""Tests: assignment, contract, integration, acceptance. What they share is in `support`."""
