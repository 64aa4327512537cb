"""Estimates of a candidate's costs at any number of ranks.

Up to a few hundred ranks, all ranks of a call can be simulated. Of more, few stand for many. The
door to this is `estimates_of`: a planner asks it for bounds, times and memory of a candidate, and
does not see which ranks were simulated.

estimates    the door
worlds       a smaller problem whose ranks each stand for several; times of the whole follow
walks        the ranks of a problem that a simulation walks
bounds       lower bounds of the time
"""

from ring_attn.planning.scale.estimates import Estimates as Estimates
from ring_attn.planning.scale.estimates import estimates_of as estimates_of
from ring_attn.planning.scale.walks import MAX_EXACT as MAX_EXACT
