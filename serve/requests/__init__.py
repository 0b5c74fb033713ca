"""A request on its way through the server.

Files in reading order:
- `request`: the request, the draft chosen for it, and the target's states for its records
- `kept_taps`: the target's states for its draft
- `input_processor`: checked requests from prompts and parameters; text of a few tokens
- `fair_queue`: order of admission

Other chapters import all of it.
"""
