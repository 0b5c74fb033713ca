"""The target model, unchanged: its states, its logits, and the checks that serving it is exact.

Files in reading order:
- `load`: loading a model, tokenizer or configuration through transformers
- `quantised`: libraries of quantised weights, and their values as numbers
- `causal_lm`: any causal LM as body and head
- `probe`: checks made when a model is loaded
- `limits`: lengths up to which texts are served
- `taps`: hidden states read by hooks
- `attention`: the attention function given to transformers
- `packed_pass`: several texts in one row
- `segments`: which token belongs to which text
- `target`: the target
- `generate`: batched generation
- `sharded`: weights spread over processes
- `ranks`: processes of one launcher
- `device`: device and dtype of every command

A folder within: `offload` (a target whose layers are read for every pass).

Other chapters import `target`, `causal_lm`, `load`, `quantised`, `taps`, `attention`, `segments`,
`device`.
"""
