"""Exports as engines read them, to check what was written.

Files in reading order:
- `table`: which reader for which layout
- `understood`: parameters of the engine's module
- `plain`: layouts read as they are
- `llamacpp`: llama.cpp
- `openvino`: OpenVINO GenAI
- `sglang`: SGLang
- `vllm`: vLLM
- `vllm_speculators`: the `speculators` layout in vLLM
- `speculators`: its types that vLLM does not read
- `vllm_eagle3`: vLLM's EAGLE-3
- `vllm_mtp`: vLLM's MTP
- `vllm_mtp_beside`: of Qwen and Ernie, under names of their own
- `sglang_mtp`: SGLang's MTP
- `vllm_taps`: layers that vLLM taps

Other chapters import `table`.
"""
