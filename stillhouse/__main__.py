"""`python -m stillhouse`: the command line, also for launchers that start modules."""

from stillhouse.cli import main

main()
