"""How shards travel: `p2p` between processes, `local` within one.

streams      what is asked of a device that queues its operators
buffers      message buffers, and the moments when they are free
"""
