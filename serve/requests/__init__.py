"""A request on its way through the server.

Files in reading order:
- `route`: the draft chosen for it
- `request`: the request
- `intake`: from what a caller asks to a checked request
- `fair_queue`: order of admission

Other chapters import all of it.
"""
