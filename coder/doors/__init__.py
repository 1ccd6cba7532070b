"""Ways in from elsewhere: many tasks in one run, on this machine or on a cluster.

Promises: each door is imported by its subcommand alone, and its packages with it; each task of a
batch has one row of results, whatever is killed.

Read batch.py first; files.py reads tasks and writes rows, workspace.py makes the folder of a task.
"""
