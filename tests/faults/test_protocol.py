"""Every interleaving of loop, ranks, supervisor and clients: nobody waits for ever, nothing is published too late."""

from __future__ import annotations

import pytest

from tests.faults.protocol import Rules, explore


@pytest.mark.parametrize(("ranks", "requests"), [(1, 3), (2, 3), (3, 1)])
def test_no_interleaving_is_bad(ranks: int, requests: int) -> None:
    """With one fault of any kind at any point, deadlines at any time, and one rebuild."""
    explored = explore(ranks, requests, Rules())
    print(f"\n{ranks} ranks, {requests} requests: {explored.states} states")
    assert explored.fault is None, (explored.fault, explored.trace)
    assert explored.states > 500


@pytest.mark.parametrize("rule", Rules._fields)
def test_each_rule_is_needed(rule: str) -> None:
    """Without it the explorer finds what goes wrong, so that its silence means something."""
    explored = explore(2, 3, Rules(**{rule: False}))
    assert explored.fault is not None, rule
    print(rule, explored.fault, explored.trace)
