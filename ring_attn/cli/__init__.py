"""The commands of `ring-attn`."""
