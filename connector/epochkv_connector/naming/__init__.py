"""What names of KV are made of beyond tokens: the weights that the ranks of this engine hold, found out by looking."""
