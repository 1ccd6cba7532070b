"""The tour: ten chapters on how an agent works, each with an exercise that is checked.

Promises: any program in any language can be a solution, since only what it sends to a server and
what it prints is looked at; a check ends what it has started; no model and no network take part.

Read checks.py first; the servers of chapters 9 and 10 have files of their own. trial.py runs a
program against the scripted server; pages/ is what one reads.
"""
