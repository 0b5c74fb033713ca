"""Versions of a fleet, shown, changed and tried in stages.

Files in reading order:
- `view`: all that is known of a fleet, as one value
- `table`: its lines in a terminal
- `page`: its page
- `show`: status and page
- `operate`: promote and rollback
- `pairs`: acceptance paired within engines
- `stage`: verdict about a stage
- `records`: served requests of all engines
- `controller`: stages of a rollout

The commands import `show`, `operate`, `records` and `controller`.
"""
