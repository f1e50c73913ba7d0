"""Statistics of samples: estimates and their intervals, comparisons, change points."""
