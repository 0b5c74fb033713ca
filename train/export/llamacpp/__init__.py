"""GGUF files for llama.cpp, written by the rules of its converter (b11434).

Files in reading order:
- `file`: a GGUF file
- `vocabulary`: tokens, merges and special tokens
- `shape`: metadata and tensor names that all decoders share
- `lm`: a draft LM, or the target beside a draft
- `heads`: EAGLE-3
- `blocks`: DFlash and DSpark

Other chapters import `file`, `lm`, `heads` and `blocks`.
"""
