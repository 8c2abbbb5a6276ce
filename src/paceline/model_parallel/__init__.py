"""One model over several workers: pipeline stages, split layers, sharded parameters.

Other folders use `arrangement`, `balance`, `layers`, `losses`, `mesh`, `parallelize`, `pipeline`, `sharded`,
`tensor`, `tensor_plan`.
"""
