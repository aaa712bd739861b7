"""Runs steps by the plan of a device that this machine does not have."""

from optax_largebatch.engine import step


def use_plan(monkeypatch, plan):
    """Every step that is on no mesh runs by this plan."""
    monkeypatch.setattr(step, "ON_ONE_DEVICE", {"here": plan})
    monkeypatch.setattr(
        step, "dispatch_by_platform", lambda lowerings, types, *flat: lowerings("here")(*flat)
    )
