"""Models and drafts as others publish them.

Files in reading order:
- `folder`: configuration and tensor names, before the family is known; architectures that
  transformers builds as a causal LM; the layout of the `speculators` library
- `fp8`: weights stored in FP8 with scales
- `hub`: what is no folder here, which the Hub is asked for
- `demo`: the model of demonstrations
- `gguf`: models in a GGUF file
- `template`: targets with another template for their chats

Other chapters import all of it.
"""
