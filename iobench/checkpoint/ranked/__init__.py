"""One checkpoint of several ranks: structure, plan, parts and index."""
