"""How shards travel: `p2p` between processes, `local` between ranks of one process."""
