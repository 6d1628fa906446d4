"""Decisions: sequences, blocks and the scheduler. Pure Python, owned by the loop."""
