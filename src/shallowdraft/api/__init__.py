"""The product in Python: one function per stage. Commands parse their options, call one of these and print.

Models are named as for `load`: a checkpoint folder, a hub id or a name of the zoo. `prompts` are names of shipped sets
and of files, or pairs of a set's name and a `prompts.Prompt`. `progress` is True (bars), False (silent), or a function
that is called with a task, the steps done and all steps. A call that was interrupted goes on where it stopped when it
is made again.
"""
