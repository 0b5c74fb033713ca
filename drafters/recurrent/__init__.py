"""States of layers that are no attention: recurrent, linear-attention and convolution layers.

Such a layer condenses a text into a state of fixed size, which cannot be rolled back. A pass here
holds several texts in a row, so a layer reads it text by text, each from its own state.

Files in reading order:
- `pieces`: which tokens of a pass follow which state
- `kept`: the state of one text from round to round
- `slots`: states of many texts
- `cached`: states that a module keeps in transformers' cache
- `attributes`: states that a module keeps in attributes of its own
- `mixers`: a module with a state, and how it reads the pieces of a pass
- `find`: the modules of a model that have a state

Other chapters import `pieces`, `kept`, `slots`, `mixers`, `find`.
"""
