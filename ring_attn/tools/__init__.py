"""The commands of `ring-attn` that do more than measure: plan, calibrate, aot and tune."""
