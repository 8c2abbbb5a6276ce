"""The protocol without IO: state machines that take events and return effects.

The core imports no torch, numpy, sockets, threads, clocks, randomness or logging. Time is an argument of every event.
Four drivers perform the effects in the order given: the node, the simulator, the property tests and the transcripts.
"""
