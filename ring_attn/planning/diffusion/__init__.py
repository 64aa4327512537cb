"""Plans of diffusion transformers: memory and time of a training step, or of denoising steps.

table        configs of known transformers, by name
config       config.json of diffusers -> TransformerConfig
inputs       inputs of the classes that are traced
traced       weights, activations and FLOPs of the real module, on the meta device
formulas     the same from the sizes alone, where the module cannot be traced
sizes        what a block and the parts outside of blocks take, by rows of video and of text
job          a job as data
attention    strategy, time and buffers of the attention over the ranks
memory       bytes of a rank by what holds them
step         seconds of a step by what takes them
fits         what the search of `planning.model.search` may choose
report       a plan as text

A rank has its rows of the video and all rows of the text, as
`ring_attn.integrations.diffusers.parallelize` splits a transformer.
"""
