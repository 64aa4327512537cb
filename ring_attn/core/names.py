"""Names that calls and commands accept, without torch, so that `--help` does not import it."""

LAYOUTS = ("contiguous", "zigzag", "striped")

# In the order of the planner's candidates, of which the first of equally fast ones is chosen.
STRATEGIES = (
    "ring",
    "all_gather",
    "exchange",
    "ulysses",
    "hybrid",
    "double_ring",
    "q_exchange",
)

DEVICES = ("cpu", "cuda")

# Names in the table of cases, which `ring-attn verify` runs. "auto" is the planner's choice;
# "boundaries" has shards of different lengths, and empty shards with two ranks or more.
TESTED_STRATEGIES = (*STRATEGIES, "hybrid all_gather", "auto")
TESTED_LAYOUTS = (*LAYOUTS, "boundaries")

# Numbers of ranks on which `audit` runs a step.
AUDITED_SIZES = (2, 3, 4)
