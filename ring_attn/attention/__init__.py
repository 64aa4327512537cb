"""Attention over split sequences: operators of torch, drivers of programs, first uses."""
