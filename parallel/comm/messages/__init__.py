"""Whether what ranks send one another arrives as it was sent."""
