"""Patches of model classes that are older than transformers' attention interface, or count tokens
where they should look at positions. Each changes a method of the loaded modules in place.

Files in reading order:
- `current`: the pass that is running
- `attention`: attention classes of their own
- `alibi`: biases by the position of keys
- `positions`: embeddings and scales that count the tokens of a pass
- `table`: class name -> patch

Other chapters import `current`, `table`.
"""
