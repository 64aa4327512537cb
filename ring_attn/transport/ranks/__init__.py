"""The ranks of a process group: how they meet, connect, distinguish calls, and fail together.

group        this rank's state: it wires the three parts below
connection   the connections of this rank, and its pools of message buffers
calls        the call under way, and the calls before it
failure      the first error, and what ranks report to each other

identity     the identity of a call, equal on all ranks
rendezvous   the rendezvous at the first call, and connections
links        gloo and NCCL, and the exchanges that the device has begun and ended
watch        a thread that polls long waits
notes        notes in the group's store, read when a wait takes long
store        the group's store, with a time limit
headers      identities in front of messages, for links without tags
errors       the texts of errors, and whether their calls were counted
configs      the file of configs, which must be the same on all ranks
member       this rank in its group
"""
