"""Attention of new tokens to a KV cache that is split across ranks."""
