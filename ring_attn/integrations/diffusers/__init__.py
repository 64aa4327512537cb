"""diffusers: transformers for images and videos whose sequence is split over ranks."""

from ring_attn.integrations.diffusers.plans import PLANS, Plan
from ring_attn.integrations.diffusers.transformer import Parallelized, parallelize

__all__ = ["PLANS", "Parallelized", "Plan", "parallelize"]
