"""Stateful graphs for OpenVINO GenAI (2026.4), traced from the modules that serve here.

Files in reading order:
- `graph`: a module made a graph with keys and values of its own, written and read
- `tokens`: the target's tokenizer as graphs
- `lm`: a draft LM, or the target beside a draft
- `heads`: EAGLE-3

Other chapters import `heads` and `lm`.
"""
