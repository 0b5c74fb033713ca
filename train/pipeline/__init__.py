"""`draftsmith run`: a pipeline of commands from one recipe, resumed stage by stage, with a report.

Files in reading order:
- `config`: its options
- `recipe`: the YAML file, what `--set` replaces, and its stages as command lines
- `runner`: stages in order, each a process of its own, their record, the report
"""
