"""Layouts, masks, tiles, programs and their sizes: pure data and plain torch."""
