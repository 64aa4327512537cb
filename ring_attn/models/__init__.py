"""Ring attention inside a model: attention modules, meshes and weight shards."""
