"""Number of tokens to draft.

Files in reading order:
- `latency`: measured time of a round
- `survival`: acceptance by position and class
- `control`: fixed, by batch size, or measured
- `forecast`: expected tokens and seconds of a round at each k
- `auto`: k by measured throughput (measure, predict, choose, probe)
- `trees`: trees or none by measured throughput
- `draft_temperature`: temperature of drafting

Other chapters import `control`.
"""
