"""The help and the options of each command, which need no torch; what runs is elsewhere."""
