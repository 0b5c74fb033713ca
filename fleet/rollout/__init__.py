"""Versions of a fleet, shown, changed, published and tried in stages.

Files in reading order:
- `show`: status, promote and rollback
- `command`: `draftsmith fleet publish`
- `controller`: stages of a rollout, acceptance paired within engines, and the verdict
"""
