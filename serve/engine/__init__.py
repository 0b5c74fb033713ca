"""The round loop: schedule, propose, run, verify, commit.

Files in reading order:
- `engine`: the loop of rounds
- `round`: values of one round
- `scheduler`: rows of a round
- `live_draft`: the served draft, and new weights under it
- `propose`: drafted tokens of a round
- `proposal`: drafted tokens, on their device and as the host reads them
- `runner`: the target's pass
- `graphs`: CUDA graphs of it
- `verify`: output tokens of a round, by its rule; kept paths of trees as chains
- `commit`: tokens, caches and updates after a round
- `output`: stop conditions and text
- `recorder`: round records
- `build`: an engine from its configuration
- `loop`: the engine's thread

Other chapters import `loop`, `build`, `engine` and `live_draft`.
"""
