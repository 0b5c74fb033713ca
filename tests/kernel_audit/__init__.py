"""Verification kernels against all that may happen in a small world, and planted mistakes that must
be seen. `draftsmith audit --kernels` is the short form of it.

Files in reading order:
- `exact`: enumeration against exact distributions
- `enumerate`: every outcome of one round
- `process`: whole generations in a small world, and how well they fit
- `world`: a small target with known distributions
- `plain_verify`: verification with its rules taken apart
- `controls`: wrong kernels that must be found
"""
