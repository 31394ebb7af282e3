"""Publishing drafters, and converting the formats of others."""
