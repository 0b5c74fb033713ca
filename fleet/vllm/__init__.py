"""Plugin in the processes of an unmodified vLLM, by its own entry points.

Files in reading order:
- `plugin`: entry points `register` and `endpoints`
- `settings`: settings from `--additional-config`
- `state`: the plugin's state in one worker
- `worker`: methods for `collective_rpc`

No other chapter imports it.
"""
