"""Which worker gets which samples: sharding, loaders, sources, data servers.

Other folders use `files`, `partition`, `prefetching`, `service.client`, `service.server`, `sharding`, `slicing`,
`source_loader`, `sources.declared`, `sources.reader`.
"""
