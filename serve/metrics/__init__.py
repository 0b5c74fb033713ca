"""Prometheus metrics, the log line, `/dashboard` and `draftsmith top`.

Files in reading order:
- `engine`: the engine's counters
- `server`: `/metrics`
- `log_line`: the periodic log line
- `dashboard`: facts, tables and points over time; the page that shows them
- `top`: `draftsmith top`, its other view

Other chapters import all of it.
"""
