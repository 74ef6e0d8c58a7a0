"""Settings: what they are, where they are read from, and the memory plan that follows from them."""
