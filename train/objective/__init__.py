"""The training loss of a draft.

Files in reading order:
- `unrolled_loss`: divergence over every unrolled position
- `teacher`: targets of the loss from the running target
- `prompt_logprobs`: the likeliest tokens alone, from an engine
- `outline`: a target that is not run here
- `stored_teacher`: the same from stored data
- `depth_weights`: weights of the depths
- `rounds_of_text`: rounds expected on teacher-forced text
- `recompute`: activations that are computed again

Other chapters import `unrolled_loss`, `teacher`, `outline`, `depth_weights` and `recompute`.
"""
