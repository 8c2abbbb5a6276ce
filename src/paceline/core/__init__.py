"""The pure core: decides what happens when, and touches nothing.

No torch, numpy, sockets, threads, clocks, randomness or logging in here. Events go in with the time as an argument,
effects come out as values, and the four drivers (the node, the simulator, the property tests, the transcripts) perform
them in the order given.

Other folders use `calls`, `consistency`, `effects`, `events`, `exactly_once`, `membership`, `messages`, `partition`,
`server`, `settings`, `standstill`, `state`, `table_reads`, `tables`, `work_queue`, `worker`.
"""
