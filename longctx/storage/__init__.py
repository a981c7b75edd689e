"""Files of tensors: one reader that trusts nothing in them, and writers that hold a block of them."""
