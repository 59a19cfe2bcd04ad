"""The dry run of a job on devices that are not there. `rank_step.py` has one rank, the other files what it needs."""
