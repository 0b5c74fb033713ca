"""alpha and tau of a draft.

Files in reading order:
- `command`: `draftsmith eval`
- `answers`: the target's answers to prompts and to a suite
- `teacher_forced`: exact, on the target's own text
- `by_context`: by the length of the context
- `estimate`: figures with their intervals
- `measured`: by lossless rounds while training, and of draft trees
- `held_out`: those of a run, within its time
"""
