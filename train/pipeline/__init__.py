"""`draftsmith run`: a pipeline of commands from one recipe, resumed stage by stage, with a report.

Files in reading order:
- `config`: its options
- `recipe`: the YAML file, and what `--set` replaces
- `names`: values of settings and results of stages in place of `${name}`
- `kinds`: commands that can be a stage, their results and inputs
- `stage`: one stage, checked, and its command line
- `changes`: what a finished stage was made of, and whether it still is
- `record`: stages that were begun and finished
- `report`: the page of figures
- `runner`: stages in order, each a process of its own

`draftsmith/commands/run.py` joins this chapter and the table of commands.
"""
