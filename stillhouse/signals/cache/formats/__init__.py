"""Files of teacher signals in the formats of other projects."""
