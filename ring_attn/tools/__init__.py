"""The commands of `ring-attn` that do more than measure: demo, plan, calibrate, aot and tune."""
