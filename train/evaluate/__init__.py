"""alpha and tau of a draft.

Files in reading order:
- `start`: checks of the options, before torch is imported
- `command`: `draftsmith eval`
- `answers`: the target's answers to prompts and to a suite
- `teacher_forced`: exact, on the target's own text
- `estimate`: figures with their intervals, and by the length of the context
- `picture`: figures as a picture
- `measured`: by lossless rounds while training, within its time
"""
