"""`draftsmith export`: a draft in another engine's layout.

Files in reading order:
- `command`: the command
- `config`: its options
- `model_card`: README.md of an export
"""
