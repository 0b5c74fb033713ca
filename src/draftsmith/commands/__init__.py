"""Commands of `draftsmith`: the table of them, their flags, and those that join two code folders.

Files in reading order:
- `table`: every command with its options, its function and its extra, and its start
- `peers`: names of options in vLLM, transformers and speculators
- `arguments`: flags from a configuration dataclass; values from recipes, overrides and flags
- `generate`: the dataset of answers, joined to the engine that writes and drafts them
- `serve`: the server, joined to the buffer that stores its rounds
- `audit`: the audit, joined to the monitor that reads buffers
- `run`: a pipeline of commands from a recipe
- `recipe`: `config`, the options of a command as a recipe
- `completion`: `completion`, a script for the shell, by shtab
- `collect_env`: `collect-env`, what a bug report needs
- `chat`: `chat`, a conversation with a server in the terminal
- `python`: commands as Python functions

`draftsmith.cli` and the names of the package itself alone import this chapter.
"""
