"""The learner's local versions folder in a store that many engines read.

Files in reading order:
- `layouts`: a version in the layouts of engines
- `upload`: one version in a store, its manifest last
- `mirror`: whatever the learner makes live
- `retention`: old versions and what kills left

The commands import `layouts` and `mirror`.
"""
