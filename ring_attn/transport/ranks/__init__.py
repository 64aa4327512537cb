"""The ranks of a process group: how they meet, connect, tell calls apart, and fail together.

identity     the identity of a call, equal on all ranks
formation    the roll-call at the first call, and connections
media        gloo and NCCL, and the exchanges that the device has begun and ended
group        this rank's state: the call under way, connections, the first failure
watch        a thread that looks at long waits
errors       their texts, and whether their calls were counted
board        notes in the group's store, read when a wait takes long
headers      identities beside messages, for media without tags
"""
