"""Before any test: an interrupt must reach the processes that tests start.

A shell starts background jobs with SIGINT ignored, and children inherit that; continuous integration is such a job.
"""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
