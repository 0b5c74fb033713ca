"""Blocks of the paged pool, and the states beside it.

Files in reading order:
- `memory`: number of blocks, and states of recurrent layers
- `blocks`: ownership of blocks
- `prefix`: prefix caching

Other chapters import all of it.
"""
