"""Losslessness from the records of served traffic: what verification did against what it must do by
the logged distributions.

Files in reading order:
- `positions`: verified positions of records, as arrays
- `events`: events of a position with their probabilities
- `monitor`: evidence by engine and version
- `audit`: one look at a whole buffer

Other chapters import `monitor` and `audit`.
"""
