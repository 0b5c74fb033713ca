"""Versions of a fleet, shown, changed and tried in stages.

Files in reading order:
- `show`: status and page
- `operate`: promote and rollback
- `stage`: acceptance paired within engines, and the verdict about a stage
- `controller`: stages of a rollout

The commands import `show`, `operate` and `controller`.
"""
