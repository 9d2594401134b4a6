"""What a GPU would run, read from the compiled module, without a GPU."""
