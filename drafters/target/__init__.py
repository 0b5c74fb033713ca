"""The target model, unchanged: its states, its logits, and the checks that serving it is exact.

Files in reading order:
- `load`: loading a model, tokenizer or configuration through transformers
- `quantised`: libraries of quantised weights, and their values as numbers
- `limits`: lengths up to which texts are served
- `causal_lm`: any causal LM as body and head
- `probe`: checks made when a model is loaded
- `taps`: hidden states read by hooks
- `attention`: the attention function given to transformers
- `packed_pass`: several texts in one row
- `target`: the target
- `adapters`: LoRA adapters of it, applied token by token, so that requests of several share a pass
- `offload`: layers that are read for every pass
- `sharded`: weights spread over the processes of one launcher
- `device`: device and dtype of every command

Other chapters import `target`, `causal_lm`, `load`, `quantised`, `taps`, `attention`,
`packed_pass`, `adapters` and `device`.
"""
