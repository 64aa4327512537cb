"""The call: one frozen value, from the public functions to the kernels.

arguments -> Options -> operator of torch.library -> Call -> programs -> machines
"""

from ring_attn.call.calls import Call, DecodeCall, Documents, GradientPlan, facts_of, purpose_of
from ring_attn.call.options import (
    AttentionOptions,
    DecodeOptions,
    DistributedOptions,
    ExecutionOptions,
    Layout,
    Masks,
    MathOptions,
    Options,
    SdpaOptions,
    check_execution,
    checked_options,
)

__all__ = [
    "AttentionOptions",
    "Call",
    "DecodeCall",
    "DecodeOptions",
    "DistributedOptions",
    "Documents",
    "ExecutionOptions",
    "GradientPlan",
    "Layout",
    "Masks",
    "MathOptions",
    "Options",
    "SdpaOptions",
    "check_execution",
    "checked_options",
    "facts_of",
    "purpose_of",
]
