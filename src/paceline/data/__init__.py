"""Which worker gets which samples: sharding, loaders, sources, data servers."""
