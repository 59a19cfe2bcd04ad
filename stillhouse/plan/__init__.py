"""Plans a job on devices that this machine does not have, by a dry run. `rank_step.py` runs the steps of one rank."""
