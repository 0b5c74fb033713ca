"""The training loss of a draft.

Files in reading order:
- `unrolled_loss`: divergence over every unrolled position
- `teacher`: targets of the loss from the running target
- `remote_teacher`: the likeliest tokens alone, from a server
- `ahead`: the next batch's target states while a step runs
- `stored_teacher`: the same from stored data
- `joined_stores`: the same from several folders
- `depth_weights`: weights of the depths
- `rounds_of_text`: rounds expected on teacher-forced text
- `feature_noise`: noise on taps
- `recompute`: activations that are computed again

Other chapters import `unrolled_loss`, `teacher`, `depth_weights` and `recompute`.
"""
