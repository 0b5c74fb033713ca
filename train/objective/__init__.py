"""The training loss of a draft.

Files in reading order:
- `unrolled_loss`: divergence over every unrolled position
- `teacher`: targets of the loss from the running target
- `prompt_logprobs`: the likeliest tokens alone, from an engine
- `outline`: a target that is not run here
- `stored_teacher`: the same from stored data
- `joined_stores`: the same from several folders
- `depth_weights`: weights of the depths
- `rounds_of_text`: rounds expected on teacher-forced text
- `feature_noise`: noise on taps
- `recompute`: activations that are computed again

Other chapters import `unrolled_loss`, `teacher`, `outline`, `depth_weights` and `recompute`.
"""
