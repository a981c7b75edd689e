"""How fast the links between ranks are: which pairs are measured when, how, and which of them is slow."""
