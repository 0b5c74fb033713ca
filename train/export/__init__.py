"""`draftsmith export`: a draft in another engine's layout.

Files in reading order:
- `start`: the check of its options, and its start
- `command`: the command
- `table`: which family for which engine
- `source`: the draft and target exported from
- `portable`: the draft's own tensors, as vLLM, SGLang and transformers read them
- `speculators`: the layout of the `speculators` library
- `mtp`: MTP modules inside their target
- `vllm_faults`: releases of vLLM whose sampled speculation is biased
- `gguf`: files for llama.cpp, and the tokens in them
- `openvino`: OpenVINO GenAI
- `serving`: commands that serve an export
- `model_card`: README.md of an export
"""
