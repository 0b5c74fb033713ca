"""Blocks of the paged pool.

Files in reading order:
- `memory`: number of blocks
- `blocks`: ownership of blocks
- `prefix`: prefix caching

Other chapters import all of it.
"""
