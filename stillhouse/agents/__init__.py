"""Tools and environments, which reply to the turns of a sample. The core knows them only as registered kinds."""
