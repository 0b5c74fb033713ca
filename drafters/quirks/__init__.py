"""Model code that transformers' attention interface does not reach.

Files in reading order:
- `patches`: older attention classes, alibi and counted positions
- `kept_state`: the state of one text from round to round
- `recurrent_states`: states of texts in layers that are no attention
- `recurrent`: modules with such a state, and how they read the pieces of a pass

Other chapters import all of it.
"""
