"""`python -m stillhouse`: the command line, for launchers that start Python modules."""

from stillhouse.cli import main

main()
