"""alpha and tau of a draft.

Files in reading order:
- `start`: checks of the options, before torch is imported
- `command`: `draftsmith eval`
- `answers`: the target's answers to prompts and to a suite
- `teacher_forced`: exact, on the target's own text, with intervals
- `picture`: figures, and the curves of a training, as pictures
- `measured`: by lossless rounds while training, within its time
"""
