"""`draftsmith run`: a pipeline of commands from one recipe, resumed stage by stage, with a report.

Files in reading order:
- `config`: its options
- `recipe`: the YAML file, what `--set` replaces, and its stages as command lines
- `runner`: stages in order, each a process of its own, and the record of those that finished
- `report`: the page of figures

`draftsmith/commands/run.py` joins this chapter and the table of commands.
"""
