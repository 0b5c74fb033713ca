"""Prometheus metrics, the log line and `/dashboard`.

Files in reading order:
- `engine`: the engine's counters
- `server`: `/metrics`
- `log_line`: the periodic log line
- `dashboard`: facts, tables and points over time; the page that shows them

Other chapters import all of it.
"""
