"""Optional parts, one file each: they may import the core, and nothing of the core imports them."""
