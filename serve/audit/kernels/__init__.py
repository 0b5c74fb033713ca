"""`draftsmith audit --kernels`.

Files in reading order:
- `checks`: all checks
- `exact`: enumeration against exact distributions
- `enumerate`: every outcome of one round
- `process`: whole generations in a small world
- `world`: a small target with known distributions
- `plain_verify`: verification with its rules taken apart
- `triton`: Triton against the reference
- `controls`: wrong kernels that must be found

Other chapters import `checks`.
"""
