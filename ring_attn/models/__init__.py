"""Attention modules, meshes and weight shards: ring attention inside a model."""
