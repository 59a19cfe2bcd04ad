"""Images in documents: an add-on that the core does not import."""
