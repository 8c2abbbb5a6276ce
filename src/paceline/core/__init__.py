"""The pure core: decides what happens when, and touches nothing.

No torch, numpy, sockets, threads, clocks, randomness or logging in here. Events go in with the time as an argument,
effects come out as values, and the four drivers (the node, the simulator, the property tests, the transcripts) perform
them in the order given.
"""
