"""What a stranger may have written: files and JSON read strictly, and what may stand in them."""
