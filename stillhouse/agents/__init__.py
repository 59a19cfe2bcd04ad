"""Tools and environments, which reply to the turns of a sample. Other packages use them only through the registry."""
