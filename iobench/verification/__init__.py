"""`iobench verify`: whether stored checkpoints are whole, whatever wrote them."""
