"""The memory and the time of a whole training step: does a model fit, and how fast is it?

table          configs of known models, by name
config         config.json -> Architecture
architecture   layers of a model as data: attention, recurrences, feedforward parts
degrees        how the ranks of a job share a model
traced         weights and activations of the real module, on the meta device
formulas       the same from the sizes alone, where the module cannot be traced
attention      strategy, layout, time and buffers of each kind of attention layer
memory         bytes of a rank by what holds them
step           seconds of a step by what takes them
search         plans, the longest sequence, the fewest GPUs: also of diffusion transformers
fits           the options of a job that the search may choose
advice         what to write into torchtitan, accelerate, axolotl and the Trainer
lines          lines of a plan as text: also of diffusion transformers
report         a plan as text
"""
