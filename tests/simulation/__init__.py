"""A whole fleet in one process: real decisions, a virtual clock, and a seeded random generator."""
