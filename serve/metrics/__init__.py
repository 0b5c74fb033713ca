"""Prometheus metrics and the log line.

Files in reading order:
- `engine`: the engine's counters
- `server`: `/metrics`
- `log_line`: the periodic log line

Other chapters import all of it.
"""
