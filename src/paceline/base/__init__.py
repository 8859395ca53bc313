"""The ground that everything stands on, without torch: meshes, sharding specs, batching, transactions, the journal."""
