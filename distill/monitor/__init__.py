"""Losslessness from the records of served traffic: what verification did against what it must do by
the logged distributions.

Files in reading order:
- `positions`: verified positions of records, as arrays
- `events`: events of a position with their probabilities, z and evidence
- `monitor`: evidence by engine and version; a whole buffer at once
"""
