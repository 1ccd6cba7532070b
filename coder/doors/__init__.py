"""Ways in from elsewhere: many tasks in one run, on this machine or on a cluster.

Promises: each door is imported by its subcommand alone, and its packages with it; each task of a
batch has one row of results, whatever is killed; a run of a server outlives its clients, and who
comes back gets what was missed.

Read batch.py first; files.py reads tasks and writes rows, workspace.py makes the folder of a task.
serve.py is the server, and names its other files.
"""
