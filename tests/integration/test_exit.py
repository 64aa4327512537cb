"""A process that has called ring attention, and destroys no group, ends without an error."""

import subprocess
import sys

# The watch waits in the store nearly all the time, as on a slow network.
PROGRAM = """
import datetime, time
import torch.distributed as dist
from ring_attn.transport.ranks import group

def look(self):
    for _ in range(100):
        try:
            store.wait(["absent"], datetime.timedelta(milliseconds=1))
        except RuntimeError:
            pass

group.PERIOD_S, group.RankGroup.look = 0.0, look
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
group._watch(group.rank_group(dist.group.WORLD))
time.sleep(0.1)
"""


def test_the_watch_ends_before_the_interpreter() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
