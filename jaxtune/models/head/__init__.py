"""From the last hidden states to scores of tokens, and divergences from a teacher, in blocks of the vocabulary."""
