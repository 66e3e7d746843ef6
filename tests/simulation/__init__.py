"""A whole fleet in one process: the real decisions, a virtual clock, seeded chance."""
