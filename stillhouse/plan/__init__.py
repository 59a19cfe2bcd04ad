"""The dry run of a job on devices that do not exist here. `rank_step.py` runs the steps of one rank."""
