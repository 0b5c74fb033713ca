"""`draftsmith bench`: speed and acceptance over HTTP.

Files in reading order:
- `command`: the command
- `config`: its options
- `prompts`: prompts
- `server`: a server of its own
- `client`: streaming requests
- `report`: figures
- `tasks`: figures by task of a suite
- `picture`: figures as a picture

Other chapters import `command`, `client` and `server`.
"""
