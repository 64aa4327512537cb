"""diffusers: transformers for images and videos whose sequence is split over ranks."""

from ring_attn.integrations.diffusers.transformer import Parallelized, parallelize
from ring_attn.values.diffusers import PLANS, Plan

__all__ = ["PLANS", "Parallelized", "Plan", "parallelize"]
