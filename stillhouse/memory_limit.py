"""Limits the memory that this process may still allocate (only on Linux)."""

import resource


def limit_memory(more: int) -> None:
    """Limit data and stack to their present size and `more` bytes; larger allocations fail with MemoryError."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[5])  # data and stack
    except OSError:
        return
    limit = pages * resource.getpagesize() + more
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
