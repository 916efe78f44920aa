"""Drawing tokens from logits, with counter-based random numbers so that a resumed stream draws the same ones."""
