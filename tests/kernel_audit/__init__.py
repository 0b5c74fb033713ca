"""Verification kernels against all that may happen in a small world, and planted mistakes that must
be seen. `draftsmith audit --kernels` is the short form of it.

Files in reading order:
- `checks`: all checks
- `exact`: enumeration against exact distributions
- `enumerate`: every outcome of one round
- `process`: whole generations in a small world
- `world`: a small target with known distributions
- `plain_verify`: verification with its rules taken apart
- `triton`: Triton against the reference
- `controls`: wrong kernels that must be found
"""
