"""What model servers and model families do: requests as they want them, answers as they send them.

Promises: a request in the server's own form (profiles.py, request.py), over one kept connection (http.py); an
answer in one form, whatever the server sent (assembler.py and what it uses); every failure a ModelError with its
kind, and whether another try is worth it (errors.py). No rule names a vendor; each stands where it can be read.

Nothing here knows of tools, sessions or terminals. The two ways in are ai.py above it, and errors.RetryPolicy.
Read assembler.py first.
"""
