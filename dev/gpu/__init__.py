"""`python -m dev gpu`: what a short time on a GPU must answer, in cells that do not harm others.

    plan.py       the stages and their cells, in order
    schedule.py   runs cells in worker processes, within limits of time
    watch.py      a worker, watched from outside; worker.py is the worker itself
    results.py    one line of JSON before and after each cell; the screen at the end
    carry.py      compiled kernels and libraries, prepared on a machine without a GPU
    estimates.py  the figures that a GPU must measure, and their table in bench/results/GPU.md

The other modules have the functions of the cells. What runs in the parent imports no torch.
"""
