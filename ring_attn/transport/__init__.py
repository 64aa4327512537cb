"""Ways for shards: `p2p` between processes, `local` within one.

streams      streams and events of a device that queues its operators
buffers      message buffers, and their last uses
"""
