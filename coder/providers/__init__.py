"""What model servers and model families do: requests in the form they want, answers in the form
they send.

Promises: a request in the server's own form (profiles.py, wire.py, request.py), over a kept
connection (endpoint.py, connection.py, https.py) or by a client of the openai package
(openai_client.py); an answer in one form, whatever the server sent (framing.py, sse.py,
assembler.py); every failure a ModelError with its kind, and whether a retry is worth it
(errors.py). Differences between servers are rows of one table.

Nothing here knows tools, sessions or terminals. The two ways in are ai.py above it, and
errors.RetryPolicy. Read assembler.py first.
"""
