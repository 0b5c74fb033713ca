"""A request on its way through the server.

Files in reading order:
- `route`: the draft chosen for it
- `tap_log`: the target's states for its records
- `request`: the request
- `kept_taps`: the target's states for its draft
- `decoder`: text of a few tokens
- `input_processor`: checked requests from prompts and parameters
- `fair_queue`: order of admission

Other chapters import all of it.
"""
