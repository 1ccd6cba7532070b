"""For building and teaching: traces, a scripted server and model, the demo, the tour, a relay.

Promises: a trace has every byte that was sent and received, without keys; the scripted server
speaks the real protocol, so that a test or a lesson needs no key and no network.

Read scripted.py first; trace.py describes the lines of a trace.
"""
