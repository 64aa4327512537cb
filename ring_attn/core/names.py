"""Names that a call and a command take, without torch: a command's help does not wait for torch."""

LAYOUTS = ("contiguous", "zigzag", "striped")

# In the order of the planner's candidates: of equally fast ones the first is chosen.
STRATEGIES = (
    "ring", "all_gather", "exchange", "ulysses", "hybrid", "double_ring", "q_exchange"
)  # fmt: skip

DEVICES = ("cpu", "cuda")

# Of the table of cases, which `ring-attn verify` runs. "auto" is the planner's choice; "boundaries"
# has shards of unequal length, with two ranks or more also empty shards.
TESTED_STRATEGIES = (*STRATEGIES, "hybrid all_gather", "auto")
TESTED_LAYOUTS = (*LAYOUTS, "boundaries")

# Numbers of ranks on which `audit` runs a step.
AUDITED_SIZES = (2, 3, 4)
