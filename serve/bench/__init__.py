"""`draftsmith bench`: speed and acceptance over HTTP.

Files in reading order:
- `command`: the command, and a server of its own
- `config`: its options
- `client`: prompts and streaming requests
- `report`: figures, of all prompts and by task of a suite
- `picture`: figures as a picture

Other chapters import `command` and `client`.
"""
