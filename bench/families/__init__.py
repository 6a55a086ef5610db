"""What engines find of each other, by family of models: a row of `bench.connector`."""
