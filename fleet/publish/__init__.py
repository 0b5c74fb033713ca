"""The learner's local versions folder in a store that many engines read.

Files in reading order:
- `layouts`: a version in the layouts of engines
- `mirror`: whatever the learner makes live, each version's manifest last, and old versions deleted
- `command`: `draftsmith fleet publish`
"""
