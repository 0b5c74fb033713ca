"""Blocks of the paged pool, and the states beside it.

Files in reading order:
- `states`: states of recurrent layers
- `memory`: number of blocks
- `blocks`: ownership of blocks
- `prefix`: prefix caching

Other chapters import all of it.
"""
