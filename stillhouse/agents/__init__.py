"""Tools and environments: what replies to the turns of a sample. The core knows them only as registered kinds."""
