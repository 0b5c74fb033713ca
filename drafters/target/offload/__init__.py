"""A target whose decoder layers are not in the device's memory, but read for every pass: by hooks
of accelerate, from the host's memory or from the model's files.

Files in reading order:
- `device_map`: place of every part of the model
- `layer_files`: layers that are left in their files, and converted as they are read
- `hooks`: hooks of the modules whose weights are elsewhere

Other chapters import `hooks`, and the check of memory `layer_files`; `load` imports all.
"""
