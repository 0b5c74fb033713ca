"""Verification kernels against all that may happen in a small world. `draftsmith audit --kernels` is
the short form of it.

Files in reading order:
- `exact`: enumeration against exact distributions
- `enumerate`: every outcome of one round
- `world`: a small target with known distributions
"""
