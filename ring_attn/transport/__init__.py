"""How shards travel: `p2p` between processes, `local` within one."""
