"""Memory that an engine shares with a writer process beside it; torch is not needed.

Files in reading order:
- `ring`: bounded ring of messages
- `arrays`: messages of arrays in a ring
- `child`: the process, started, watched and ended with the engine

Every code folder may import this chapter.
"""
