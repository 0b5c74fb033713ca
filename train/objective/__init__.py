"""The training loss of a draft.

Files in reading order:
- `unrolled_loss`: divergence over every unrolled position
- `teacher`: targets of the loss from the running target
- `prompt_logprobs`: the likeliest tokens alone, from an engine
- `outline`: a target that is not run here
- `stored_teacher`: the same from stored data, and against the draft's vocabulary alone
- `rounds_of_text`: rounds expected on teacher-forced text, and weights of the depths
"""
